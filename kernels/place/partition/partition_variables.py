"""Partitioning: variables are replaced by their shards, and updates run shard by shard."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import tensorflow as tf

from autodist.errors import StrategyError
from autodist.graph.editor import NodeDef
from autodist.graph.find_stages import find_stages, nodes_for
from autodist.graph.flows import flows_of
from autodist.graph.names import node_of
from autodist.graph.ops import Trait, having
from autodist.graph.parts import Variable, VariableGradient
from autodist.graph.stages import Stages
from autodist.graph.step import PlacedStep
from autodist.graph.step_editor import StepEditor
from autodist.graph.walks import reach
from autodist.kernels.base import Context, Kernel
from autodist.kernels.place.partition import rows
from autodist.kernels.place.partition.access import access
from autodist.kernels.place.partition.along_axes import partition_along_axes
from autodist.kernels.place.partition.arithmetic import DIVIDED, on_pieces
from autodist.kernels.place.partition.layouts import Alike, Along, Routed, RowIds
from autodist.kernels.place.partition.routes import route
from autodist.kernels.place.partition.work import PartitionedVariable, Work
from autodist.kernels.plan import Plan
from autodist.layout import DrawAt, Kind, Propagation, RowsOfDraw, Unknown
from autodist.placement.partitioning import shard_name
from autodist.placement.synchrony import SyncMode

log = logging.getLogger("autodist")

Rule = Callable[[Work, NodeDef], bool]

RULES: Mapping[str, Rule] = {
    **dict.fromkeys(DIVIDED, on_pieces),
    **dict.fromkeys(having(Trait.IDENTITY | Trait.CASTS), rows.passed_on),
    **dict.fromkeys(having(Trait.UNIQUE), rows.unique),
    "UnsortedSegmentSum": rows.segment_sum,
    "GatherV2": rows.gather,
}
"""The rule for each op of an update that can run on pieces. Other ops, and ops whose inputs do not fit their rule, run
on the concatenated tensor, which is always correct and costs the concatenation."""


@dataclass(frozen=True)
class PartitionVariables(Kernel[PlacedStep, PlacedStep]):
    """Partitions variables, their slots, gradients and updates into shards according to their holders.

    Later kernels treat each shard as a separate variable. A read becomes the concatenation of the shards' reads; a
    gather along the cut axis gathers each shard's own rows. Each shard gets its part of a gradient: a slice of a dense
    one, or the rows of a sparse one that it holds. The rewrite follows the update from gradients and reads to the
    writes. Elementwise arithmetic runs on the pieces. Reductions over the cut axis (global norms, LAMB, Adafactor) run
    on each piece and are completed across the pieces: scalars are sent instead of shards. Other ops run on the
    concatenated tensor, and each shard takes its part of the result. Partitioning does not change any value.

        g → f → v    becomes    g[:n] → f → v/shard_0   and   g[n:] → f → v/shard_1
    """

    name: ClassVar[str] = "partition-variables"
    after: ClassVar[Mapping[str, str]] = {
        "choose-row-joins": "it traces tensors back to the captured batch",
    }

    def apply(self, step: PlacedStep, context: Context) -> PlacedStep:
        step = partition_along_axes(step, lambda *one: partition(*one).step)
        if not any(name in step.by_name for name in step.partitionings):
            return step
        partitioned = partition(step)
        _require_synchronous(partitioned.written_whole, context.plan)
        for line in partitioned.log_lines if context.worker == 0 else ():
            log.info("%s", line)
        return partitioned.step


@dataclass(frozen=True)
class Partitioned:
    """A step with partitioned variables.

    Attributes:
        step: the step.
        log_lines: lines about ops that do not run on pieces.
        written_whole: the partitioned variables that an op writes as a whole, with the op.
    """

    step: PlacedStep
    log_lines: tuple[str, ...]
    written_whole: Mapping[str, str]


def partition(step: PlacedStep, label: str = "partition") -> Partitioned:
    """Partitions a step's variables according to their holders; `label` is that of new nodes."""
    flows = step.flows or flows_of(step)  # propagation does not follow routed rows
    stages = find_stages(step)
    updating = _find_updates(step, stages)
    work = Work(step, StepEditor(step), stages.effects, label)
    _make_handles(work)
    gradients = cut_gradients(work, stages.gradients, stages.once)
    for name in sorted(stages.order, key=stages.order.__getitem__):
        node = work.editor[name]
        if not access(work, node) and name in updating and node.op in RULES:
            RULES[node.op](work, node)
    work.finish()
    variables = _variables(work)
    work.editor.prune(work.editor.named(gradients=gradients, variables=variables))
    log_lines = tuple(work.put_together(stages.once))
    made = work.editor.to_step(
        gradients=gradients, variables=variables, flows=CutFlows(flows, work), parts={**step.parts, **_parts(work)}
    )
    return Partitioned(made, log_lines, dict(work.written_whole))


def _find_updates(step: PlacedStep, stages: Stages) -> set[str]:
    """Returns the nodes of the updates, those included that depend on no gradient.

    momentum · m - rate · g → m     the first product          v - rate · decay · v → v     all nodes
    """
    index = step.graph_index
    of_batch = reach(map(node_of, step.batch_axes), index.readers)
    gradients = [node_of(name) for gradient in stages.gradients for name in gradient.tensors]
    compute = reach(gradients, index.data.__getitem__)
    roots = stages.once.union(write for write in stages.state_writes if write not in of_batch)
    return nodes_for(step, roots).keys() - compute


def _require_synchronous(written_whole: Mapping[str, str], plan: Plan) -> None:
    """Checks that variables which are written as a whole are synchronous.

    Raises:
        StrategyError: a parameter server applies each worker's gradient separately.
    """
    for variable, op in written_whole.items():
        synchrony = plan.synchrony(shard_name(variable, 0))
        if synchrony is not None and synchrony.mode is SyncMode.ASYNCHRONOUS:
            raise StrategyError(
                f"{variable} is partitioned, and {op} writes it as a whole, while its servers apply each worker's "
                "gradient on arrival, shard by shard. Make it synchronous (sync: true), or do not partition it."
            )


class CutFlows(Propagation):
    """Dependence on the batch of captured tensors and of their slices, in a partitioned step."""

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
        """Returns the captured tensor that a tensor equals or is a slice of; None if partitioning created it."""
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
    """Returns the step's variables, with shards in place of partitioned variables."""
    found: list[Variable] = []
    for variable in work.step.variables:
        cut = work.variables.get(variable.handle)
        found += [variable] if cut is None else cut.shards
    return (*found, *work.copies)


def _parts(work: Work) -> Mapping[str, tuple[int, str]]:
    """Returns the shards of a variable's parts on a mesh, by handle: the coordinate and the first part's shard."""
    found: dict[str, tuple[int, str]] = {}
    for handle, cut in work.variables.items():
        coordinate, first = work.step.part_of(handle)
        if coordinate:
            found |= {shard.handle: (coordinate, shard_name(first, k)) for k, shard in enumerate(cut.shards)}
    return found


def cut_gradients(
    work: Work, gradients: Sequence[VariableGradient], once: Collection[str]
) -> tuple[VariableGradient, ...]:
    """Returns the gradients of the step, with those of partitioned variables in pieces.

    Nodes that run once and read the whole gradient get the concatenation of its pieces: along the cut axis for a dense
    gradient, as rows in shard order for a sparse one.
    """
    gradients_in_pieces: list[VariableGradient] = []
    for gradient in gradients:
        cut = work.variables.get(work.step.by_name[gradient.variable].handle)
        if cut is None:
            gradients_in_pieces.append(gradient)
            continue
        pieces = _cut(work, gradient, cut, once)
        gradients_in_pieces += [
            replace(gradient, variable=shard.name, tensors=tensors)
            for shard, tensors in zip(cut.shards, pieces, strict=True)
        ]
    return tuple(gradients_in_pieces)


def _cut(
    work: Work, gradient: VariableGradient, cut: PartitionedVariable, once: Collection[str]
) -> list[tuple[str, ...]]:
    readers = [[c for c in work.editor.consumers(node_of(t)) if c in once] for t in gradient.tensors]
    if not gradient.is_sparse:
        pieces, wholes = _cut_dense(work, gradient.tensors[0], cut)
    elif cut.cut.axis == 0:
        pieces, wholes = _route_rows(work, gradient, cut)
    else:
        pieces, wholes = _cut_rows(work, gradient, cut)
    for name, whole, consumers in zip(gradient.tensors, wholes, readers, strict=True):
        work.editor.rewire(name, whole, consumers)
    return pieces


_Cut = tuple[list[tuple[str, ...]], Sequence[str]]
"""The gradient's tensors for each shard, and the tensors that stand for the whole gradient."""


def _cut_dense(work: Work, name: str, cut: PartitionedVariable) -> _Cut:
    spec = tf.TensorSpec(cut.variable.shape, work.spec(name).dtype)
    with work.subgraph("gradient") as f:
        split = tf.split(f.input(name, spec.dtype, spec.shape), list(cut.cut.sizes), cut.cut.axis)
    pieces = tuple(map(f.name, split))
    whole = _concatenate(work, pieces, cut.cut.axis)
    work.register(whole, Along(cut.cut), pieces)
    return [(piece,) for piece in pieces], [whole]


def _route_rows(work: Work, gradient: VariableGradient, cut: PartitionedVariable) -> _Cut:
    ids, values = gradient.tensors
    routed = route(work, ids, cut.cut, [values])
    with work.subgraph("gradient") as f:
        own = f.inputs(routed.ids)
        whole = tf.concat([i + start for i, start in zip(own, cut.cut.starts, strict=True)], 0)
    all_ids = f.name(whole)
    all_values = _concatenate(work, routed.rows[0], 0)
    work.register(all_ids, RowIds(all_ids, cut.cut), routed.ids)
    work.register(all_values, Routed(all_ids), routed.rows[0])
    return list(zip(routed.ids, routed.rows[0], strict=True)), [all_ids, all_values]


def _cut_rows(work: Work, gradient: VariableGradient, cut: PartitionedVariable) -> _Cut:
    """Splits the rows of a sparse gradient by columns: every shard has a part of each row."""
    with work.subgraph("gradient") as f:
        (indices, rows) = f.inputs(gradient.tensors)
        copies = [tf.identity(indices) for _ in cut.shards]
        split = tf.split(rows, list(cut.cut.sizes), cut.cut.axis)
        one = tf.identity(copies[0])
    own, pieces = tuple(map(f.name, copies)), tuple(map(f.name, split))
    all_ids = f.name(one)
    whole = _concatenate(work, pieces, cut.cut.axis)
    work.register(all_ids, Alike(), own)
    work.register(whole, Along(cut.cut), pieces)
    return list(zip(own, pieces, strict=True)), [all_ids, whole]


def _concatenate(work: Work, pieces: Sequence[str], axis: int) -> str:
    with work.subgraph("gradient") as f:
        whole = tf.concat(f.inputs(pieces), axis)
    return f.name(whole)
