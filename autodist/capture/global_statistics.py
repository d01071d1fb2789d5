"""Computes parts of a loss over the whole batch: statistics that are combined with single examples, and comparisons.

The step is traced again for that, since its gradients pass through the exchange of the replicas.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar

import tensorflow as tf

from autodist.capture.trace_changes import SCOPE, TraceChanges, Wanted
from autodist.graph.batch_statistics import BatchSearch, NodeInput, Statistic, find_statistics
from autodist.graph.compared_examples import Rows, find_compared
from autodist.graph.cotangent_statistics import find_in_cotangents
from autodist.graph.flows import flows_of
from autodist.graph.origins import line_of
from autodist.graph.read_again import branches_read_again, find_behind, writes_read_again
from autodist.graph.step import CapturedStep
from autodist.logs.terminal import ALIKE_EVERYWHERE

log = logging.getLogger("autodist")

MOST_TRACES = 8

_OF_LAYERS = "batch_normalization.py"
"""Keras's file of batch normalization, which uses its replica's examples unless it is synchronized."""

_CUSTOM_GRADIENTS = "custom_gradient.py", ("tape_grad_fn", "internal_grad_fn", "actual_grad_fn")
"""TensorFlow's file of `tf.custom_gradient`, and its functions that call the script's gradient."""

_RECOMPUTES = "inner_recompute_grad"
"""The gradient of `tf.recompute_grad` in that file: a layer and its own gradient, which use no other values."""


class Captured(Protocol):
    """The result of a trace."""

    @property
    def step(self) -> CapturedStep: ...

    @property
    def graph(self) -> tf.Graph: ...


C = TypeVar("C", bound=Captured)


def with_global_statistics(capture: Callable[[TraceChanges], C]) -> C:
    """Returns the step of `capture`, with the whole batch's sums, means and rows if its losses need them.

    A loss needs them if its dependence on the batch is known only with them, or if the step writes values computed from
    them and reads these again. Rows are gathered for the parts of a loss that compare examples. Several traces may be
    needed, as one such value may hide others. If another obstacle remains, the step is unchanged.
    """
    changes = TraceChanges()
    kept = captured = capture(changes)
    needed = _Needed(captured)
    wanted: dict[NodeInput, Statistic | Rows] = {}
    made: Mapping[NodeInput, str | None] = {}
    replaced_inputs = made
    for _ in range(MOST_TRACES):
        if needed.statistics is None:
            kept, replaced_inputs = captured, made
        more = needed.statistics or {}
        if needed.batch is None or not (more or needed.branches) or not wanted.keys().isdisjoint(more):
            break
        wanted |= more
        changes = TraceChanges(wanted, needed.batch, changes.branches | needed.branches)
        try:
            captured, before = capture(changes), needed
        except (TypeError, ValueError, tf.errors.InvalidArgumentError) as error:
            if not any(isinstance(one, Rows) for one in wanted.values()):
                raise
            why = str(error).strip().rpartition("\n")[2].strip() or type(error).__name__
            log.info("a loss compares examples, and cannot be traced with those of all replicas: %s", why)
            break
        if not changes.is_made:
            break
        needed, made = _Needed(captured), changes.made
        if needed.read_again < before.read_again:
            kept, replaced_inputs = captured, made
    rows = {place for place, one in wanted.items() if isinstance(one, Rows)}
    log_global_statistics({place: line for place, line in replaced_inputs.items() if place not in rows})
    _log_lines(
        "a loss or gradient compares examples with one another (%s): each replica computes that part for the whole "
        "batch, whose rows the replicas exchange during the step.",
        {place: line for place, line in replaced_inputs.items() if place in rows},
    )
    if needed.left:
        log.warning(
            "a tf.custom_gradient combines gradients with values of the batch (%s) that are neither sums nor means nor "
            "computed from its rows by TensorFlow alone. Each replica takes those of its own examples: the training "
            "differs from one device's.", ", ".join(dict.fromkeys(needed.left)), extra=ALIKE_EVERYWHERE,
        )  # fmt: skip
    return kept


class _Needed:
    """The statistics of the whole batch that a step needs.

    Attributes:
        batch: an input with a row for each example, and the axis of the rows; None if there is none.
        read_again: writes of replicas' own values that the step reads again in its losses.
        branches: the conditionals in which such values are written.
        statistics: the sums and means to compute over the whole batch, and the rows to gather. None if there are none;
            empty if another obstacle remains.
        left: the lines of gradients of the script that use other values of the batch.
    """

    def __init__(self, captured: Captured) -> None:
        step, made = captured.step, {op.name: op for op in captured.graph.get_operations()}
        self.batch = next(iter(step.batch_axes.items()), None)
        self.read_again: frozenset[str] = frozenset()
        self.branches: frozenset[str] = frozenset()
        self.statistics: Wanted | None = None
        self.left: list[str] = []
        if self.batch is None:
            return

        flows = flows_of(step)
        search = BatchSearch(step, flows, functools.partial(is_layers, made))
        self.read_again = frozenset(writes_read_again(step, flows))
        self.branches = frozenset(branches_read_again(step, flows))
        behind = find_behind(self.read_again, search)
        self.statistics = behind or find_statistics(search)
        if self.statistics is None:
            gradients = [gradient.tensors[-1] for gradient in step.gradients]
            is_custom = functools.partial(is_of_custom_gradient, made)
            found = find_in_cotangents(search, gradients, is_custom)
            self.statistics = found.wanted or None
            self.left = [line_of(made[node]) or node for node in found.left]
        elif not self.statistics:
            self.statistics = find_compared(search)


def is_layers(made: Mapping[str, tf.Operation], node: str) -> bool:
    """Returns True for a node of a layer that is documented to use its replica's examples, or of no operation.

    Args:
        made: the operations of the graph, by name.
        node: the name of the node.
    """
    return node not in made or any(frame.filename.endswith(_OF_LAYERS) for frame in made[node].traceback)


def is_of_custom_gradient(made: Mapping[str, tf.Operation], node: str) -> bool:
    """Returns True for a node of the backward pass that a `tf.custom_gradient` has made; arguments as `is_layers`."""
    file, callers = _CUSTOM_GRADIENTS
    frames = made[node].traceback if node in made and not node.startswith(SCOPE) else ()
    names = {frame.name for frame in frames if frame.filename.endswith(file)}
    return _RECOMPUTES not in names and not names.isdisjoint(callers)


def log_global_statistics(made: Mapping[NodeInput, str | None]) -> None:
    _log_lines(
        "a loss or gradient combines sums or means of the batch with single examples, or reads values that the step "
        "keeps of them (%s): they are those of the whole batch, which the replicas exchange during the step.",
        made,
    )


def _log_lines(text: str, made: Mapping[NodeInput, str | None]) -> None:
    """Logs a text about some inputs of nodes with the lines of the script that have made these nodes."""
    if made:
        lines = dict.fromkeys(line or place.node for place, line in made.items())
        log.info(text, ", ".join(lines), extra=ALIKE_EVERYWHERE)
