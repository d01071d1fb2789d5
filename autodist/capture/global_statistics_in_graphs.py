"""Computes batch statistics in losses of plain graphs over the whole batch, if single examples are combined with them.

A graph is not traced again. Inputs that read such a value read the whole batch's before the loss is differentiated, so
that gradients pass through the exchange of the replicas.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from autodist.capture.assemble import CaptureNotes, assemble
from autodist.capture.global_statistics import (
    MOST_TRACES,
    is_layers,
    is_of_custom_gradient,
    log_global_statistics,
)
from autodist.capture.gradients import RecordedGradientCall
from autodist.capture.graph_mode import handle_name, replace_by_placeholder
from autodist.capture.in_step_all_reduces import AllReduceNotes
from autodist.capture.loss_decomposition import SEED_NAME, VALUE_NAME, DecompositionPoint, decompose
from autodist.capture.session_resources import GETS
from autodist.capture.trace_changes import SCOPE, global_statistic
from autodist.graph.batch_statistics import BatchSearch, NodeInput, Statistic, Statistics, find_statistics
from autodist.graph.cotangent_statistics import InCotangents, find_in_cotangents
from autodist.graph.editor import GraphEditor
from autodist.graph.flows import flows_of
from autodist.graph.in_step_all_reduce import SUM_NAME
from autodist.graph.names import node_of
from autodist.graph.ops import Trait, having
from autodist.graph.origins import line_of
from autodist.graph.step import CapturedStep
from autodist.graph.walks import reach
from autodist.logs.terminal import ALIKE_EVERYWHERE

log = logging.getLogger("autodist")

_FED = having(Trait.FED) | GETS

_OURS = (SEED_NAME, VALUE_NAME, SUM_NAME)


@dataclass(frozen=True)
class _Changed:
    """An input of an operation that reads the whole batch's value now, and its tensor before."""

    operation: tf.Operation
    index: int
    before: tf.Tensor


@dataclass(frozen=True)
class GraphBatchStatistics:
    """Computes batch statistics in losses of plain graphs over the whole batch, as in `@ad.function`.

    Attributes:
        notes: receives the in-step all-reduces.
    """

    notes: AllReduceNotes

    def decompose(
        self,
        targets: Sequence[tf.Tensor],
        ends: Collection[tf.Tensor],
        seed: tf.Tensor,
        earlier: Sequence[RecordedGradientCall],
    ) -> tuple[list[tf.Tensor], tuple[DecompositionPoint, ...]]:
        """Decomposes targets, as `decompose` does, after their batch statistics are those of the whole batch.

        Several rounds may be needed, as one such value may hide others. If another obstacle remains, the graph is
        restored.

        Args:
            targets: the differentiated tensors.
            ends: tensors at which the search stops.
            seed: scales the gradients.
            earlier: the calls of `gradient` recorded before.
        """
        apart, points = decompose(targets, ends)
        noted, changed, lines = len(self.notes.sums), list[_Changed](), dict[NodeInput, str | None]()
        for _ in range(MOST_TRACES):
            call = RecordedGradientCall(seed.graph, tuple(targets), seed, (), (), points)
            forward = _Forward.of(call, earlier, self.notes)
            needed = None if forward is None else forward.statistics()
            if forward is None or needed is None:
                log_global_statistics(lines)
                return apart, points
            operations = {place: seed.graph.get_operation_by_name(place.node) for place in _in_order(needed)}
            if not needed or any(op._get_control_flow_context() is not None for op in operations.values()):
                break
            for place, operation in operations.items():
                changed.append(self._read_whole(forward, operation, place, needed[place]))
                lines[place] = line_of(operation)
            apart, points = decompose(targets, ends)
        for one in reversed(changed):
            one.operation._update_input(one.index, one.before)
        del self.notes.sums[noted:]
        return decompose(targets, ends) if changed else (apart, points)

    def _read_whole(
        self, forward: _Forward, operation: tf.Operation, place: NodeInput, statistic: Statistic
    ) -> _Changed:
        before = operation.inputs[place.index]
        with operation.graph.control_dependencies(None), tf.name_scope(SCOPE):
            whole = global_statistic(self.notes, statistic, before, forward.batch_of(before), forward.named)
        operation._update_input(place.index, whole)
        return _Changed(operation, place.index, before)


@dataclass(frozen=True)
class _Forward:
    """The forward computation of a call of `gradient`, as a step in which each batch has a row for each example.

    The axis along which a session splits a feed is not known yet; the first open axis is assumed. Values that turn out
    to be the same on all replicas are not exchanged.

    Attributes:
        graph: the script's graph.
        step: the step; its last call of `gradient` is the one about to be made.
        fed: the graph's tensors by the inputs of the step that stand for them.
    """

    graph: tf.Graph
    step: CapturedStep
    fed: Mapping[str, tf.Tensor]

    @classmethod
    def of(
        cls, call: RecordedGradientCall, earlier: Sequence[RecordedGradientCall], notes: AllReduceNotes
    ) -> _Forward | None:
        """Returns None if the targets of the call depend on no batch."""
        graph = call.graph
        editor = GraphEditor(graph.as_graph_def())
        before = editor.ancestors([t.op.name for t in call.targets])
        present = [*(c for c in earlier if c.graph is graph and c.seed.op.name in before), call]
        roots = [t.op.name for c in present for t in _tensors(c)]
        needed = editor.ancestors(roots)
        found = [t for op in graph.get_operations() if op.name in needed and _may_be_fed(op) for t in op.outputs]
        axes = _axes_of(found)
        if not axes:
            return None
        fed = {replace_by_placeholder(editor, t): t for t in found if t.ref() in axes}
        editor.prune([*roots, *map(node_of, fed)])
        placeholders = {node_of(name): t.name for name, t in fed.items()}
        noted = CaptureNotes(graph, present, handle_name, placeholders, sums=notes.sums)
        step = assemble(noted, editor.to_graph_def(), (), {name: axes[t.ref()] for name, t in fed.items()}, [], [])
        return cls(graph, step, fed)

    def statistics(self) -> Statistics | None:
        """Returns the sums and means to compute over the whole batch, as `find_statistics`."""
        is_left = functools.partial(is_layers, {op.name: op for op in self.graph.get_operations()})
        search = BatchSearch(self.step, flows_of(self.step), is_left)
        return find_statistics(search, [len(self.step.gradient_calls) - 1])

    def batch_of(self, value: tf.Tensor) -> tuple[tf.Tensor, int]:
        """Returns a batch that a value is computed from, and the axis of its examples."""
        made_of = reach([value.op.name], self.step.graph_index.data.__getitem__)
        name = next(name for name in self.fed if node_of(name) in made_of)
        axis = self.step.inputs[name]
        assert axis is not None
        return self.fed[name], axis

    def named(self, name: str) -> tf.Tensor:
        """Returns the tensor of the script's graph for one of the step."""
        return self.fed[name] if name in self.fed else self.graph.get_tensor_by_name(name)


def warn_replica_statistics(step: CapturedStep, graph: tf.Graph, seeds: Collection[str]) -> None:
    """Warns of sums and means in a loss that each replica takes over its own examples instead of the batch.

    Args:
        step: the step that trains, with its batches. Its outputs are the gradients.
        graph: the graph of the step.
        seeds: seeds of the calls of `gradient` that train variables.
    """
    made = {op.name: op for op in graph.get_operations()}
    calls = [k for k, call in enumerate(step.gradient_calls) if call.seed in seeds]
    search = BatchSearch(step, flows_of(step), functools.partial(is_layers, made))
    left = find_statistics(search, calls)

    def lines(places: Iterable[NodeInput]) -> str:
        return ", ".join(dict.fromkeys(line_of(made[place.node]) or place.node for place in _in_order(places)))

    if left:
        log.warning(
            "a loss combines sums or means of the batch with values of single examples (%s), and each replica takes "
            "those of its own examples: the training differs from one device's. They are the whole batch's if "
            "optimizer.minimize or tf.gradients makes the gradients outside of tf.cond and tf.while_loop, and each "
            "placeholder of a batch leaves its first axis open (None).",
            lines(left), extra=ALIKE_EVERYWHERE,
        )  # fmt: skip
    is_custom = functools.partial(is_of_custom_gradient, made)
    found = find_in_cotangents(search, step.outputs, is_custom) if left is None else InCotangents({})
    if scales := (*found.wanted, *(NodeInput(node, 0) for node in found.left)):
        log.warning(
            "gradients are combined with sums, means or other values of the batch (%s), as a tf.custom_gradient may, "
            "and each replica takes those of its own examples: the training differs from one device's. They are the "
            "whole batch's in a step of ad.function.",
            lines(scales), extra=ALIKE_EVERYWHERE,
        )  # fmt: skip


def _in_order(places: Iterable[NodeInput]) -> list[NodeInput]:
    return sorted(places, key=lambda place: (place.node, place.index))


def _tensors(call: RecordedGradientCall) -> list[tf.Tensor]:
    return [*call.forward_tensors, *(t for point in call.decomposition_points for t in (point.seed, point.value))]


def _may_be_fed(operation: tf.Operation) -> bool:
    return operation.type in _FED and not operation.name.rpartition("/")[2].startswith(_OURS)


def _open_axis(fed: tf.Tensor) -> int | None:
    """Returns the first axis of a feed with an unknown length; 0 for an iterator's element."""
    lengths = fed.shape.as_list() if fed.shape.rank else []
    if lengths and fed.op.type in GETS:
        return 0
    return lengths.index(None) if None in lengths else None


def _axes_of(found: Iterable[tf.Tensor]) -> dict[Any, int]:
    """Returns the axis along which a session will split each feed; 0 if none is open and all batches have one length.

    Such a graph trains if each worker is one replica, which gets all feeds of its worker.
    """
    fed = [t for t in found if t.shape.rank]
    axes = {t.ref(): axis for t in fed if (axis := _open_axis(t)) is not None}
    alike = {t.shape[0] for t in fed} if not axes else set()
    return {t.ref(): 0 for t in fed} if len(alike) == 1 else axes
