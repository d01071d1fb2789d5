"""Partition variables: what is cut becomes variables of its own, and its updates are done shard by shard."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import tensorflow as tf

from autodist.errors import StrategyError
from autodist.graph.editor import NodeDef
from autodist.graph.find_stages import find_stages
from autodist.graph.flows import flows_of
from autodist.graph.ops import Trait, having
from autodist.graph.parts import Variable
from autodist.graph.placement import shard_name
from autodist.graph.propagation import DrawAt, Kind, Propagation, RowsOfDraw, Unknown
from autodist.graph.step import Step
from autodist.graph.step_editor import StepEditor
from autodist.graph.variable_placement import SyncMode
from autodist.kernels.base import Context, Kernel
from autodist.kernels.place.partition import rows
from autodist.kernels.place.partition.access import access
from autodist.kernels.place.partition.arithmetic import FOLLOWED, REDUCTIONS, elementwise, reduction
from autodist.kernels.place.partition.gradients import cut_gradients
from autodist.kernels.place.partition.work import Work
from autodist.kernels.plan import Plan

log = logging.getLogger("autodist")

Rule = Callable[[Work, NodeDef], bool]

RULES: Mapping[str, Rule] = {
    **dict.fromkeys(FOLLOWED, elementwise),
    **dict.fromkeys(REDUCTIONS, reduction),
    **dict.fromkeys(having(Trait.SAME | Trait.CASTS), rows.passed_on),
    **dict.fromkeys(having(Trait.UNIQUE), rows.unique),
    "UnsortedSegmentSum": rows.segment_sum,
    "GatherV2": rows.gather,
}
"""How an op of an update is done on pieces. An op that is not here, or whose inputs do not fit its rule, is done on the
whole: that is always right, and costs that the whole is put together."""


@dataclass(frozen=True)
class PartitionVariables(Kernel):
    """Cuts variables, their slots, gradients and updates into shards, as `Step.cuts` says.

    After it each shard is a variable of its own to every other kernel. Reads become a concatenation of the shards',
    gathers along the cut axis ask each shard for its own rows. Of a gradient each shard gets its part: a slice of a
    dense one, the rows of a sparse one that it holds. The update is followed from gradients and reads to the writes:
    arithmetic element by element is done on the pieces; reductions over the cut axis (global norms, LAMB, Adafactor)
    are made of each piece and completed across them, so that numbers travel and not shards. What is neither is done on
    the whole, which is put together for it, and each shard then takes its part: so where a variable is cut changes
    where things are computed, and nothing else.

        g → f → v    becomes    g[:n] → f → v/shard_0   and   g[n:] → f → v/shard_1
    """

    name: ClassVar[str] = "partition-variables"

    def apply(self, item: Step, context: Context) -> Step:
        if not any(name in item.by_name for name in item.cuts):
            return item
        made = partition(item)
        _require_synchronous(made.written_whole, context.plan)
        for line in made.told if context.worker == 0 else ():
            log.info("%s", line)
        return made.item


@dataclass(frozen=True)
class Partitioned:
    """A step with its variables cut.

    Attributes:
        item: the step.
        told: what to tell of parts that are not done in pieces.
        written_whole: variables that are cut and that an op writes as a whole, and the op.
    """

    item: Step
    told: tuple[str, ...]
    written_whole: Mapping[str, str]


def partition(item: Step) -> Partitioned:
    """Cuts a step's variables as `item.cuts` says."""
    flows = item.flows or flows_of(item)  # how rows are routed is not followed by propagation
    stages = find_stages(item)
    work = Work(item, StepEditor(item), stages.effects)
    _make_handles(work)
    gradients = cut_gradients(work, stages.gradients, stages.once)
    for name in sorted(stages.order, key=stages.order.__getitem__):
        node = work.editor[name]
        if not access(work, node) and name in stages.once and node.op in RULES:
            RULES[node.op](work, node)
    work.finish()
    variables = _variables(work)
    work.editor.prune(work.editor.named(gradients=gradients, variables=variables))
    told = tuple(work.put_together(stages.once))
    made = work.editor.to_item(gradients=gradients, variables=variables, flows=CutFlows(flows, work))
    return Partitioned(made, told, dict(work.written_whole))


def _require_synchronous(written_whole: Mapping[str, str], plan: Plan) -> None:
    """Passes if what is written as a whole is written once a step, from what all workers have.

    Raises:
        StrategyError: a server applies the gradient of each worker by itself.
    """
    for variable, op in written_whole.items():
        variable_placement = plan.variable_placement(shard_name(variable, 0))
        if variable_placement is not None and variable_placement.pace is SyncMode.ASYNCHRONOUS:
            raise StrategyError(
                f"{variable} is partitioned, and {op} writes it as a whole, while its servers apply each worker's "
                "gradient as it comes, shard by shard. Make it synchronous (sync: true), or leave it whole."
            )


class CutFlows(Propagation):
    """How tensors depend on the batch: the captured ones, and slices of these."""

    def __init__(self, captured: Propagation, work: Work) -> None:
        self._captured, self._work = captured, work

    def kind(self, tensor: str) -> Kind:
        source = self._source(tensor)
        return Unknown("it was made where variables were cut") if source is None else self._captured.kind(source)

    def rows_for_each(self, tensor: str) -> int | None:
        source = self._source(tensor)
        return None if source is None else self._captured.rows_for_each(source)

    def draws_within(self, node: str) -> Mapping[DrawAt, RowsOfDraw | None]:
        return self._captured.draws_within(node) if self._work.is_captured(node) else {}

    def _source(self, tensor: str) -> str | None:
        """The captured tensor that a tensor is or is a slice of; None: it was made where variables were cut."""
        source = self._work.sliced_from(tensor)
        return source if self._work.is_captured(source) else None


def _make_handles(work: Work) -> None:
    for handle, cut in work.variables.items():
        for shard in cut.shards:
            node = NodeDef()
            node.CopyFrom(work.editor[handle])
            node.name = shard.handle
            node.attr["shape"].shape.CopyFrom(tf.TensorShape(shard.shape).as_proto())
            node.attr["shared_name"].s += shard.handle.removeprefix(handle).encode()
            work.editor.add(node)


def _variables(work: Work) -> tuple[Variable, ...]:
    """The step's variables, shards in the place of those that are cut."""
    found: list[Variable] = []
    for variable in work.item.variables:
        cut = work.variables.get(variable.handle)
        found += [variable] if cut is None else cut.shards
    return (*found, *work.copies)
