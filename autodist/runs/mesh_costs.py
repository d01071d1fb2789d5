"""Costs of a step on a mesh for a given batch: FLOPs, bytes held, and bytes sent between the places."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import tensorflow as tf

from autodist.graph.activations import activation_bytes
from autodist.graph.find_stages import find_stages
from autodist.graph.flops import flops_of_nodes, with_inferred_shapes
from autodist.graph.gradient_rows import gradient_rows
from autodist.graph.names import node_of
from autodist.graph.partial_count import PartialCount
from autodist.graph.step import CapturedStep, PlacedStep
from autodist.kernels import KERNELS, Context, run_pipeline
from autodist.kernels.place.slots import find_slots
from autodist.kernels.shard.lower import is_sent_whole, piece_lengths
from autodist.kernels.shard.partition import ShardTensors
from autodist.kernels.shard.reshards import Reshard, ReshardKind
from autodist.proto import strategy_pb2
from autodist.runs.stage_costs import Link, Rewriting
from autodist.strategies import SyncedVariable, link_bytes, synced_variables
from autodist.strategies.mesh_table import GRADIENT_SUM, CollectiveFigures, MeshFigures, part_figures
from autodist.synchronizers import mesh_of

_SENDS_NOTHING = (ReshardKind.SLICE, ReshardKind.INDEX)


@dataclass(frozen=True)
class Collective:
    """A reshard node of a step.

    Attributes:
        reshard: its transfer.
        elements: the number of elements of the tensor that a place sends to each other place; None: not known.
        item: the bytes of an element.
        is_cut: True if each place reduces one piece of the tensor.
        is_per_replica: True if it runs once for each replica; False if once for each worker.
    """

    reshard: Reshard
    elements: int | None
    item: int
    is_cut: bool
    is_per_replica: bool

    def bytes_between(self, rank: int, other: int, count: int) -> int | None:
        """Returns the bytes from one place of a row of `count` to another, by their ranks; None: not known."""
        if self.elements is None:
            return None
        if not self.is_cut:
            return self.elements * self.item
        lengths = piece_lengths(self.elements, count)
        return (lengths[rank] + lengths[other]) * self.item


@dataclass(frozen=True)
class MeshCosts:
    """The work of the places of a mesh in a step.

    Attributes:
        strategy: a strategy with a mesh.
        captured: the captured step.
        sharded: the program of each place, with reshard nodes.
        shapes: shapes of the inputs in the part of the batch of one replica, as far as known.
    """

    strategy: strategy_pb2.Strategy
    captured: CapturedStep
    sharded: PlacedStep
    shapes: Mapping[str, Sequence[int]]

    @cached_property
    def _inferred(self) -> tf.Graph:
        """The program of a place, with the shapes that follow from those of its inputs."""
        wanted = {*map(node_of, self.sharded.outputs), *self.sharded.targets} or self.sharded.named
        return with_inferred_shapes(self.sharded, sorted(wanted), self.shapes)

    @cached_property
    def flops(self) -> PartialCount:
        """The FLOPs of one replica."""
        return PartialCount.of(flops_of_nodes(self._inferred).values())

    @cached_property
    def activations(self) -> PartialCount:
        """The bytes of the activations of one replica."""
        return activation_bytes(self.sharded, self._inferred)

    @cached_property
    def held(self) -> int:
        """The bytes of variables that each worker holds, slots included."""
        return sum(variable.byte_size for variable in self.sharded.variables)

    @cached_property
    def examples(self) -> int | None:
        """The number of examples of a replica; None: not known."""
        split = {name: axis for name, axis in self.sharded.inputs.items() if axis is not None}
        main = [name for name in split if name not in self.sharded.apart]
        if not main or not self.shapes.keys() >= {*main}:
            return None
        return max(self.shapes[name][split[name]] for name in main)

    @cached_property
    def collectives(self) -> tuple[Collective, ...]:
        """The collectives of a step that send something, in topological order."""
        once = find_stages(self.sharded).once
        found = []
        for op in self._inferred.get_operations():
            reshard = Reshard.of(op.node_def)
            if reshard is not None and reshard.kind not in _SENDS_NOTHING:
                sent = op.outputs[0] if op.type == "Split" else op.inputs[0]
                count, static = mesh_of(self.strategy).count(reshard.axes), self.sharded.spec_of(sent.name)
                is_cut = reshard.kind is ReshardKind.ALL_REDUCE and not is_sent_whole(static, count)
                elements = sent.shape.num_elements()
                found.append(Collective(reshard, elements, sent.dtype.size, is_cut, op.name not in once))
        return tuple(found)

    @cached_property
    def rows(self) -> dict[str, int]:
        """The number of gradient rows of each sparse variable; without those that depend on the data."""
        return gradient_rows(self.sharded, self.shapes)

    @cached_property
    def sums(self) -> dict[str, dict[Link, int]]:
        """For each trained variable, the bytes from worker to worker by which its gradient is summed."""
        parts = {variable.name: variable for variable in synced_variables(self.sharded)}
        return {
            node.variable: self._summed(parts[node.variable], node, self.rows.get(node.variable, 0))
            for node in self.strategy.nodes
        }

    @property
    def links(self) -> dict[Link, PartialCount]:
        """The bytes from worker to worker in a step."""
        found: dict[Link, PartialCount] = {}
        for links in self.sums.values():
            for link, count in links.items():
                found[link] = found.get(link, PartialCount()) + PartialCount(count)
        for one in self.collectives:
            for link, size in self._links_of(one):
                found[link] = found.get(link, PartialCount()) + PartialCount.of([size])
        return found

    def figures(self, unused: Sequence[str] = ()) -> MeshFigures:
        """Returns the figures for tables; `unused` are patterns that match no variable."""
        mesh, annotations = mesh_of(self.strategy), self.sharded.annotations
        origins, missing = {}, []
        if annotations is not None:
            origins = {name: str(one.origin) for name, one in annotations.variables.items()}
            missing = [str(origin) for origin, reached in annotations.reached().items() if not reached]
        return MeshFigures(
            mesh=str(mesh),
            places=mesh.size,
            workers=len({place.worker for place in self.strategy.mesh.places}),
            variables=part_figures(mesh, self.captured, self.sharded.shardings, origins, find_slots(self.captured)),
            held=self.held,
            collectives=tuple(self._collective_figures()),
            examples=self.examples,
            unused=(*unused, *missing),
        )

    def _collective_figures(self) -> Iterator[CollectiveFigures]:
        mesh = mesh_of(self.strategy)
        by_kind: dict[tuple[str, tuple[str, ...]], list[int | None]] = {}
        calls: Counter[tuple[str, tuple[str, ...]]] = Counter()
        for one in self.collectives:
            key, count = (one.reshard.kind.value, one.reshard.axes), mesh.count(one.reshard.axes)
            calls[key] += 1
            by_kind.setdefault(key, []).extend(one.bytes_between(0, other, count) for other in range(1, count))
        for (kind, axes), sizes in by_kind.items():
            yield CollectiveFigures(kind, axes, calls[kind, axes], PartialCount.of(sizes))
        sent = [sum(count for (source, _), count in links.items() if source == 0) for links in self.sums.values()]
        if any(sent):
            is_least = any(v.is_sparse and v.name not in self.rows for v in synced_variables(self.sharded))
            count = sum(map(bool, sent))
            yield CollectiveFigures(GRADIENT_SUM, (self.strategy.mesh.data,), count, PartialCount(sum(sent), is_least))

    def _links_of(self, one: Collective) -> Iterator[tuple[Link, int | None]]:
        """Yields the sender and the receiver of each message of a collective, and its bytes."""
        mesh, places = mesh_of(self.strategy), self.strategy.mesh.places
        senders = set()
        for place in range(mesh.size):
            source = places[place].worker
            if not one.is_per_replica and source in senders:
                continue
            senders.add(source)
            row = mesh.row(place, one.reshard.axes)
            for rank, other in enumerate(row):
                if places[other].worker != source:
                    yield (source, places[other].worker), one.bytes_between(row.index(place), rank, len(row))

    def _summed(self, part: SyncedVariable, node: strategy_pb2.VariableNode, rows: int) -> dict[Link, int]:
        """Returns the bytes by which the places of each row along the data axis sum the gradient of a variable."""
        mesh, places = mesh_of(self.strategy), self.strategy.mesh.places
        data = [self.strategy.mesh.data] if self.strategy.mesh.data else []
        found: dict[Link, int] = {}
        for row in dict.fromkeys(mesh.row(place, data) for place in range(mesh.size)):
            config = strategy_pb2.GraphConfig()
            config.CopyFrom(self.strategy.graph_config)
            del config.replicas[:]
            config.replicas.extend(places[place] for place in row)
            found.update(link_bytes(part, node, config, rows))
        return found


def mesh_costs(
    step: CapturedStep, context: Context, shapes: Mapping[str, Sequence[int]], seen: Rewriting | None = None
) -> MeshCosts:
    """Returns the costs of a step on a mesh.

    Args:
        step: the captured step.
        context: context of one of the workers.
        shapes: shapes of the inputs in the part of the first batch of that worker, by name, if known.
        seen: the step's rewriting, if it has been rewritten.

    Raises:
        StrategyError, RewriteError: the step cannot be sharded.
    """
    seen = seen or Rewriting()
    if seen.sharded is None:
        kernels = KERNELS[: 1 + next(k for k, one in enumerate(KERNELS) if isinstance(one, ShardTensors))]
        run_pipeline(kernels, step, context, seen)
    assert seen.sharded is not None, "recorded behind the kernel"
    replicas, of_replica = len(context.local_replicas), {}
    for name, shape in shapes.items():
        axis, lengths = step.inputs.get(name), list(shape)
        if axis is not None and lengths:
            lengths[axis] = -(-lengths[axis] // replicas)
        of_replica[name] = tuple(lengths)
    return MeshCosts(context.strategy, step, seen.sharded, of_replica)
