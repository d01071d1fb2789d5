"""Costs of the stages of a pipeline for a given batch size: FLOPs, and bytes sent between stages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from math import ceil

import tensorflow as tf

from autodist.errors import AutoDistError
from autodist.graph.flops import flops_of_nodes, with_inferred_shapes
from autodist.graph.names import is_control, node_of, output_index, tensor
from autodist.graph.op_types import type_of
from autodist.graph.partial_count import PartialCount
from autodist.graph.step import ALL_EXAMPLES, EXAMPLES, CapturedStep, PlacedStep, ReplicatedStep, Step
from autodist.graph.walks import reach
from autodist.kernels import KERNELS, Context
from autodist.kernels.base import run_pipeline
from autodist.kernels.pipelined.assign_stages import AssignStages
from autodist.kernels.pipelined.place_stages import PlaceStages
from autodist.kernels.pipelined.stage_placement import StagePlacement
from autodist.kernels.replicate.replicate import Replicate
from autodist.kernels.shard.copy_for_places import CopyForPlaces
from autodist.kernels.shard.shard_tensors import ShardTensors

Link = tuple[int, int]
"""Sender and receiver: two workers, or two stages."""


@dataclass(frozen=True)
class StageCosts:
    """The work of the stages in a step.

    Attributes:
        examples: number of examples in the largest micro-batch.
        is_fed: True if `examples` is from the first batch; False if it is 1, because no batch is known.
        forward: FLOPs of each stage for the largest micro-batch, without the update.
        backward: FLOPs of each stage in the backward pass.
        each: bytes from worker to worker for the largest micro-batch.
        once: bytes from worker to worker that are sent once a step: inputs of the batch, values of variables, sums of
            gradients, outputs of the step.
        links: bytes from worker to worker in a step, as if all micro-batches were as large.
    """

    examples: int
    is_fed: bool
    forward: tuple[PartialCount, ...]
    backward: tuple[PartialCount, ...]
    each: Mapping[Link, PartialCount]
    once: Mapping[Link, PartialCount]
    links: Mapping[Link, PartialCount]


@dataclass
class Rewriting:
    """Records the intermediate forms of a step between kernels; passed to `rewrite`.

    Attributes:
        sharded: the step as the program of each place of a mesh, with reshard nodes.
        of_places: the step as the program of all places of a worker for one part of the batch.
        assigned: the step with the stage of each captured node.
        replicated: the step with the micro-batches as replicas of one worker.
    """

    sharded: PlacedStep | None = None
    of_places: PlacedStep | None = None
    assigned: PlacedStep | None = None
    replicated: ReplicatedStep | None = None

    def __call__(self, kernel: str, step: Step) -> None:
        if kernel == ShardTensors.name and isinstance(step, PlacedStep):
            self.sharded = step
        elif kernel == CopyForPlaces.name and isinstance(step, PlacedStep):
            self.of_places = step
        elif kernel == AssignStages.name and isinstance(step, PlacedStep) and step.pipeline_parts:
            self.assigned = step
        elif kernel == Replicate.name and isinstance(step, ReplicatedStep) and self.assigned is not None:
            self.replicated = step


def costs_of(
    step: CapturedStep, context: Context, shapes: Mapping[str, Sequence[int]], seen: Rewriting | None = None
) -> StageCosts | None:
    """Returns the costs of the stages of a pipeline; None if they cannot be computed from the step alone.

    Args:
        step: the captured step.
        context: context of one of the workers.
        shapes: shapes of the inputs in the first batch, by name, if known.
        seen: the step's rewriting, if it has been rewritten.
    """
    seen = seen or Rewriting()
    if not (step.targets or step.outputs):
        return None  # the entire graph of a session: the parts that will run are not known
    if seen.replicated is None:
        kernels = tuple(takewhile(lambda one: not isinstance(one, PlaceStages), KERNELS))
        try:
            run_pipeline(kernels, step, context, seen)
        except AutoDistError:  # raised again when the step is rewritten for training
            return None
    if seen.assigned is None or seen.replicated is None:
        return None
    try:
        return _Costs(seen.assigned, seen.replicated, context, shapes).find()
    except ValueError:  # TensorFlow's: a step may not accept one example, or have constants of the batch's length
        return None


class _Costs:
    """The computation of one `costs_of`."""

    def __init__(
        self, assigned: PlacedStep, replicated: ReplicatedStep, context: Context, shapes: Mapping[str, Sequence[int]]
    ) -> None:
        self.assigned, self.replicated, self.context = assigned, replicated, context
        self.parts = len(context.replicas)
        split = {name: axis for name, axis in assigned.inputs.items() if axis is not None}
        self.shapes = {name: lengths for name in assigned.inputs if (lengths := self._known(name, shapes)) is not None}
        """Shapes of the inputs, as far as they are known."""
        counts = {name: self.shapes[name][axis] if name in self.shapes else None for name, axis in split.items()}
        self.is_fed = None not in counts.values()
        if not self.is_fed:
            for name in split.keys() & self.shapes.keys():
                self.shapes[name][split[name]] = self.parts
        main = [count for name, count in counts.items() if name not in assigned.apart]
        self.examples = max((count or 0 for count in main), default=0) if self.is_fed else self.parts

    def _known(self, name: str, shapes: Mapping[str, Sequence[int]]) -> list[int | None] | None:
        if name in shapes:
            return list(shapes[name])
        known = self.assigned.spec_of(name).shape
        return None if known.rank is None else list(known.as_list())

    def find(self) -> StageCosts:
        crossings = list(StagePlacement(self.replicated, self.context).crossings())
        captured = {
            self.replicated.replica_of(node_of(c.name))[1] for c in crossings if self._is_per_micro_batch(c.name)
        }
        wanted = sorted({*self.assigned.pipeline_parts, *captured})
        of_one = with_inferred_shapes(self.assigned, wanted, self._micro_batch_shapes())
        shared = self._shared([c.name for c in crossings if not self._is_per_micro_batch(c.name)], of_one)
        each: dict[tuple[Link, int], list[int | None]] = {}
        once: dict[Link, list[int | None]] = {}
        for crossing in crossings:
            way = crossing.source, crossing.reader
            micro_batch, _ = self.replicated.replica_of(node_of(crossing.name))
            if self._is_per_micro_batch(crossing.name):
                each.setdefault((way, micro_batch), []).append(_byte_size(of_one, self._captured(crossing.name)))
            else:
                once.setdefault(way, []).append(shared[crossing.name])
        links = {way: PartialCount.of(sizes) for way, sizes in once.items()}
        for (way, _), sizes in each.items():
            links[way] = links.get(way, PartialCount()) + PartialCount.of(sizes)
        directions = self._flops(of_one)
        return StageCosts(
            ceil(self.examples / self.parts),
            self.is_fed,
            *directions,
            each={way: PartialCount.of(sizes) for (way, _), sizes in reversed(each.items())},
            once={way: PartialCount.of(sizes) for way, sizes in once.items()},
            links=links,
        )

    def _micro_batch_shapes(self) -> dict[str, list[int | None]]:
        """Returns the shapes of the inputs in the largest micro-batch."""
        shapes = {}
        for name, shape in self.shapes.items():
            axis, lengths = self.assigned.inputs[name], list(shape)
            if axis is not None:
                lengths[axis] = ceil((lengths[axis] or 0) / self.parts)
            shapes[name] = lengths
        return shapes

    def _flops(self, of_one: tf.Graph) -> tuple[tuple[PartialCount, ...], tuple[PartialCount, ...]]:
        """Returns the FLOPs of each stage, forward and backward."""
        of_nodes = flops_of_nodes(of_one)
        counts: list[list[list[int | None]]] = [[[] for _ in self.context.placement.stages.groups] for _ in range(2)]
        for name, part in self.assigned.pipeline_parts.items():
            counts[part.is_backward][part.stage].append(of_nodes.get(name, 0))
        forward, backward = (tuple(map(PartialCount.of, stages)) for stages in counts)
        return forward, backward

    def _is_per_micro_batch(self, name: str) -> bool:
        """Returns True if a tensor belongs to one micro-batch: it has a copy per micro-batch, or there is only one."""
        node = node_of(name)
        if self.replicated.copies:
            return node in self.replicated.copies
        part = self.replicated.pipeline_parts.get(node)
        return part is not None and not part.is_held

    def _captured(self, name: str) -> str:
        return f"{self.replicated.replica_of(node_of(name))[1]}:{output_index(name)}"

    def _shared(self, names: Sequence[str], of_one: tf.Graph) -> dict[str, int | None]:
        """Returns the bytes of tensors that all micro-batches share.

        Infers their shapes by importing the shared nodes into a graph, with placeholders for the tensors of a
        micro-batch.
        """
        graph_index = self.replicated.graph_index
        needed = reach(map(node_of, names), lambda node: () if self._is_known(node) else graph_index.data[node])
        nodes = [graph_index.nodes[name] for name in graph_index.order if name in needed and not self._is_known(name)]
        read = {tensor(i) for node in nodes for i in node.input if not is_control(i)}
        with tf.Graph().as_default() as graph:
            placeholders = {
                t: self._placeholder(t, of_one) for t in sorted(read.union(names)) if self._is_known(node_of(t))
            }
            tf.import_graph_def(
                _without_order(self.replicated, nodes),
                {t: placeholders[t] for t in placeholders.keys() & read},
                name="",
            )
        return {t: _byte_size(graph, placeholders[t].name if t in placeholders else t) for t in names}

    def _is_known(self, node: str) -> bool:
        """Returns True if a node is fed or belongs to one micro-batch."""
        return node in self._fed or self._is_per_micro_batch(node)

    @cached_property
    def _fed(self) -> frozenset[str]:
        return frozenset(map(node_of, (*self.replicated.inputs, EXAMPLES, ALL_EXAMPLES)))

    def _placeholder(self, name: str, of_one: tf.Graph) -> tf.Tensor:
        kind = tf.as_dtype(type_of(self.replicated.graph_index, name))
        if name in (EXAMPLES, ALL_EXAMPLES):
            return tf.constant(self.examples, kind)  # shared nodes split the inputs by it
        if name in self.shapes:
            return tf.compat.v1.placeholder(kind, self.shapes[name])
        original = _tensor(of_one, self._captured(name))
        return tf.compat.v1.placeholder(kind, None if original is None else original.shape)


def _without_order(step: Step, nodes: Iterable[tf.compat.v1.NodeDef]) -> tf.compat.v1.GraphDef:
    """Returns a graph of some nodes of a step without control dependencies."""
    graph_def = tf.compat.v1.GraphDef(library=step.graph_def.library, versions=step.graph_def.versions)
    for node in nodes:
        copy = graph_def.node.add()
        copy.CopyFrom(node)
        copy.ClearField("input")
        copy.input.extend(i for i in node.input if not is_control(i))
        for noted in ("_class", "_output_shapes"):  # they refer to absent nodes, or are outdated
            copy.attr.pop(noted, None)
    return graph_def


def _tensor(graph: tf.Graph, name: str) -> tf.Tensor | None:
    try:
        return graph.get_tensor_by_name(name)
    except (KeyError, ValueError):  # added by a later kernel
        return None


def _byte_size(graph: tf.Graph, name: str) -> int | None:
    """Returns the bytes of a tensor; None if its shape is not known."""
    value = _tensor(graph, name)
    if value is not None and value.op.type == "BroadcastGradientArgs":
        value = value.op.inputs[0]  # the outputs are some of the axes, at most as many
    if value is None or value.dtype == tf.string or not value.shape.is_fully_defined():
        return None
    return int(value.shape.num_elements() * value.dtype.size)
