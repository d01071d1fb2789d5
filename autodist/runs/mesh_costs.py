"""Costs of a step on a mesh for a given batch: FLOPs, bytes held, and bytes sent between the places."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations
from math import prod

import tensorflow as tf

from autodist.graph.activations import activation_bytes
from autodist.graph.find_stages import find_stages
from autodist.graph.flops import flops_of_nodes, with_inferred_shapes
from autodist.graph.gradient_rows import gradient_rows
from autodist.graph.names import node_of
from autodist.graph.partial_count import PartialCount
from autodist.graph.parts import Variable
from autodist.graph.step import CapturedStep, PlacedStep
from autodist.kernels import KERNELS, Context, run_pipeline
from autodist.kernels.pipelined.stage_placement import StagePlacement
from autodist.kernels.place.slots import find_slots
from autodist.kernels.replicate.replicate import Replicate
from autodist.kernels.shard.copy_for_places import CopyForPlaces
from autodist.kernels.shard.lower_reshards import is_sent_whole, piece_lengths
from autodist.kernels.shard.reshards import Reshard, ReshardKind
from autodist.placement.partitioning import Partitioning, even_sizes
from autodist.proto import strategy_pb2
from autodist.runs.stage_costs import Link, Rewriting
from autodist.sharding import WHOLE, Sharding
from autodist.strategies import SyncedVariable, link_bytes, synced_variables
from autodist.strategies.mesh_table import GRADIENT_SUM, SLICES, CollectiveFigures, MeshFigures, part_figures
from autodist.strategies.nodes import partitioned_node
from autodist.synchronizers import mesh_of, partitioning_of, synchronizers_of, with_owners_in_row

_SENDS_NOTHING = (ReshardKind.SLICE, ReshardKind.INDEX)


@dataclass(frozen=True)
class Collective:
    """A reshard node of a step.

    Attributes:
        name: of the node.
        reshard: its transfer.
        elements: the number of elements of the tensor that a place sends to each other place; None: not known.
        item: the bytes of an element.
        is_cut: True if each place reduces one piece of the tensor.
        is_per_replica: True if it runs once for each replica; False if once for each worker.
    """

    name: str
    reshard: Reshard
    elements: int | None
    item: int
    is_cut: bool
    is_per_replica: bool

    def bytes_between(self, places: Mapping[int, int], source: int, to: int) -> int | None:
        """Returns the bytes from one worker of a row to another; None: not known.

        Args:
            places: the number of places of each worker, in the order of the row.
            source: the worker that sends.
            to: the worker that receives.
        """
        if self.elements is None:
            return None
        if self.is_cut:
            lengths = dict(zip(places, piece_lengths(self.elements, len(places)), strict=True))
            return (lengths[source] + lengths[to]) * self.item
        tensors = {
            ReshardKind.ALL_GATHER: places[source],
            ReshardKind.REDUCE_SCATTER: places[to],
            ReshardKind.ALL_TO_ALL: places[source] * places[to],
        }
        return self.elements * self.item * tensors.get(self.reshard.kind, 1)


@dataclass(frozen=True)
class MeshCosts:
    """The work of the places of a mesh in a step.

    Attributes:
        strategy: a strategy with a mesh.
        captured: the captured step.
        sharded: the program of each place, with reshard nodes.
        of_places: the program of all places of a worker for one part of the batch.
        shapes: shapes of the inputs in the part of the batch of one replica, as far as known.
        placement: the stages of the nodes, if each row of the mesh is a pipeline.
    """

    strategy: strategy_pb2.Strategy
    captured: CapturedStep
    sharded: PlacedStep
    of_places: PlacedStep
    shapes: Mapping[str, Sequence[int]]
    placement: StagePlacement | None = None

    @cached_property
    def _inferred(self) -> tf.Graph:
        """The program of a place, with the shapes that follow from those of its inputs."""
        return _with_shapes(self.sharded, self.shapes)

    @cached_property
    def _inferred_of_places(self) -> tf.Graph:
        """The program of all places of a worker, with the shapes that follow from those of its inputs."""
        return self._inferred if self.of_places is self.sharded else _with_shapes(self.of_places, self.shapes)

    @cached_property
    def flops(self) -> PartialCount:
        """The FLOPs of a worker for one part of the batch."""
        return PartialCount.of(flops_of_nodes(self._inferred_of_places).values())

    @cached_property
    def activations(self) -> PartialCount:
        """The bytes of the activations of a worker for one part of the batch."""
        return activation_bytes(self.of_places, self._inferred_of_places)

    @property
    def held_at_place(self) -> int:
        """The bytes of variables that the first device of a worker holds, slots included; the longest slices."""
        return sum(self._held_of(variable, 0) for variable in self.sharded.variables)

    @cached_property
    def shardings(self) -> dict[str, Sharding]:
        """The shardings of the divided variables, with the data axis."""
        found = dict(self.sharded.shardings)
        for variable in self.sharded.variables:
            holder = self.sharded.holders.get(variable.name)
            if holder is not None and holder.axis is not None and variable.name not in self._copied:
                whole = Sharding((WHOLE,) * len(variable.shape))
                own = found.get(variable.name, whole)
                axes = (*own.axes[holder.axis], self.strategy.mesh.data)
                found[variable.name] = own.with_axes(holder.axis, axes)
        return found

    @cached_property
    def _copied(self) -> set[str]:
        """The variables of which each worker has the whole part, whose slots alone are in slices."""
        return {
            node.variable for node in self.strategy.nodes if any(one.has_cached_copy for one in synchronizers_of(node))
        }

    def held(self, worker: int) -> int:
        """Returns the bytes of variables that a worker holds, slots included."""
        mesh, places = mesh_of(self.strategy), Context(self.strategy, worker).coordinates
        total = 0
        for variable in self.sharded.variables:
            sharding = self.sharded.shardings.get(variable.name)
            axes = [axis for along in sharding.axes for axis in along] if sharding is not None else []
            total += self._held_of(variable, worker) * len({mesh.index(place, axes) for place in places})
        return total

    def _held_of(self, variable: Variable, worker: int) -> int:
        """Returns the bytes of a part of a variable that a worker holds, all of it or its slices."""
        holder = self.sharded.holders.get(variable.name)
        if holder is None or variable.name in self._copied:
            return variable.byte_size
        # The holders are those in the row of the first worker.
        first, own = Context(self.strategy, 0).row, Context(self.strategy, worker).row
        alike = {first[rank].worker for rank, place in enumerate(own) if place.worker == worker}
        slices = (one for one in holder.slices if alike & {*one.group.workers})
        return sum(prod(one.shape) * variable.dtype.size for one in slices)

    @property
    def _workers(self) -> list[int]:
        return sorted({place.worker for place in self.strategy.mesh.places})

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
                count = len(self._places_in(mesh_of(self.strategy).row(0, reshard.axes)))
                static = self.sharded.spec_of(sent.name)
                is_cut = reshard.kind is ReshardKind.ALL_REDUCE and not is_sent_whole(static, count)
                elements = sent.shape.num_elements()
                found.append(Collective(op.name, reshard, elements, sent.dtype.size, is_cut, op.name not in once))
        return tuple(found)

    @cached_property
    def rows(self) -> dict[str, int]:
        """The number of gradient rows of each sparse variable; without those that depend on the data."""
        return gradient_rows(self.sharded, self.shapes)

    @cached_property
    def sums(self) -> dict[str, dict[Link, int]]:
        """For each trained variable, the bytes from worker to worker by which its gradient is summed.

        In a pipeline, sums of gradients are among the transfers of the stages (`StageCosts`).
        """
        parts = {variable.name: variable for variable in synced_variables(self.sharded)}
        nodes = self.strategy.nodes if self.placement is None else ()
        return {
            node.variable: self._summed(parts[node.variable], node, self.rows.get(node.variable, 0)) for node in nodes
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
            workers=len(self._workers),
            variables=part_figures(mesh, self.captured, self.shardings, origins, find_slots(self.captured)),
            held=max(map(self.held, self._workers)),
            collectives=tuple(self._collective_figures()),
            examples=self.examples,
            unused=(*unused, *missing),
            stages=len(self.strategy.pipeline.stages) or 1,
        )

    def _collective_figures(self) -> Iterator[CollectiveFigures]:
        mesh = mesh_of(self.strategy)
        by_kind: dict[tuple[str, tuple[str, ...]], list[int | None]] = {}
        calls: Counter[tuple[str, tuple[str, ...]]] = Counter()
        for one in self.collectives:
            for place, (times, stage) in self._runs_of(one).items():
                key = (one.reshard.kind.value + stage, one.reshard.axes)
                calls[key] += times
                sizes = [*self._messages(one, mesh.row(place, one.reshard.axes))] * times
                first = self.strategy.mesh.places[place].worker
                by_kind.setdefault(key, []).extend(size for (source, _), size in sizes if source == first)
        for (kind, axes), found in by_kind.items():
            yield CollectiveFigures(kind, axes, calls[kind, axes], PartialCount.of(found))
        in_slices = {node.variable for node in self.strategy.nodes if node.shards}
        for kind in (GRADIENT_SUM, SLICES):
            variables = [name for name in self.sums if (name in in_slices) is (kind == SLICES)]
            sent = [sum(n for (source, _), n in self.sums[name].items() if source == 0) for name in variables]
            if any(sent):
                of_kind = [v for v in synced_variables(self.sharded) if v.name in variables]
                is_least = any(v.is_sparse and v.name not in self.rows for v in of_kind)
                total = PartialCount(sum(sent), is_least)
                yield CollectiveFigures(kind, (self.strategy.mesh.data,), sum(map(bool, sent)), total)

    def _runs_of(self, one: Collective) -> dict[int, tuple[int, str]]:
        """Returns how often a place runs a collective in a step: the first place, or that of each stage, with a text.

        On a mesh without stages, the numbers are those of one replica.
        """
        if self.placement is None:
            return {0: (1, "")}
        firsts = [(stage, group.workers[0]) for stage, group in enumerate(self.placement.stages.groups)]
        return {
            worker: (count, f" of stage {stage}") for stage, worker in firsts if (count := self._runs[one.name, worker])
        }

    @cached_property
    def _runs(self) -> Counter[tuple[str, int]]:
        """The number of runs of each collective by each worker of the first row, by the captured name of its node."""
        found = Counter[tuple[str, int]]()
        names = {one.name for one in self.collectives}
        for name, workers in self.placement.runs_at.items() if self.placement is not None else ():
            _, captured = self.placement.step.replica_of(name) if self.placement is not None else (0, name)
            if captured in names:
                found.update((captured, worker) for worker in workers)
        return found

    def _links_of(self, one: Collective) -> Iterator[tuple[Link, int | None]]:
        """Yields the sender and the receiver of each message of a collective, and its bytes."""
        mesh = mesh_of(self.strategy)
        if self.placement is not None:
            for place in Context(self.strategy, 0).mesh_row:
                messages = [*self._messages(one, mesh.row(place, one.reshard.axes))]
                yield from messages * self._runs[one.name, self.strategy.mesh.places[place].worker]
            return
        places: Iterable[int] = range(mesh.size)
        if not one.is_per_replica:
            places = [place for worker in self._workers for place in Context(self.strategy, worker).coordinates]
        for row in dict.fromkeys(mesh.row(place, one.reshard.axes) for place in places):
            yield from self._messages(one, row)

    def _messages(self, one: Collective, row: Sequence[int]) -> Iterator[tuple[Link, int | None]]:
        """Yields the sender and the receiver of each message of a collective in a row, and its bytes."""
        places = self._places_in(row)
        for source, to in permutations(places, 2):
            yield (source, to), one.bytes_between(places, source, to)

    def _places_in(self, row: Sequence[int]) -> Counter[int]:
        """Returns the number of places of each worker in a row, in the order of the row."""
        return Counter(self.strategy.mesh.places[place].worker for place in row)

    def _summed(self, part: SyncedVariable, node: strategy_pb2.VariableNode, rows: int) -> dict[Link, int]:
        """Returns the bytes by which the workers of each row along the data axis sum its gradients and send its slices.

        Workers with several parts of the variable sum the gradient of each.
        """
        mesh, places = mesh_of(self.strategy), self.strategy.mesh.places
        sharding = self.sharded.shardings.get(part.name)
        axes = [axis for along in sharding.axes for axis in along] if sharding is not None else []
        data = [self.strategy.mesh.data] if self.strategy.mesh.data else []
        found, known = Counter[Link](), set[tuple[tuple[int, ...], int]]()
        for row in dict.fromkeys(mesh.row(place, data) for place in range(mesh.size)):
            summed = (tuple(places[place].worker for place in row), mesh.index(row[0], axes))
            if summed in known:
                continue
            known.add(summed)
            config = strategy_pb2.GraphConfig()
            config.CopyFrom(self.strategy.graph_config)
            del config.replicas[:]
            config.replicas.extend(places[place] for place in row)
            found.update(link_bytes(part, _in_row(node, part, summed[0]), config, rows))
        return dict(found)


def _with_shapes(step: PlacedStep, shapes: Mapping[str, Sequence[int]]) -> tf.Graph:
    """Returns the graph of a step, with the shapes that follow from those of its inputs."""
    wanted = {*map(node_of, step.outputs), *step.targets} or step.named
    return with_inferred_shapes(step, sorted(wanted), shapes)


def _in_row(node: strategy_pb2.VariableNode, part: SyncedVariable, row: Sequence[int]) -> strategy_pb2.VariableNode:
    """Returns the node of a part of a variable in a row of workers."""
    own = with_owners_in_row(strategy_pb2.Strategy(nodes=[node]), row).nodes[0]
    partitioning = partitioning_of(own)
    if partitioning is None:
        return own
    sizes = even_sizes(part.shape[partitioning.axis], len(partitioning.sizes))
    return partitioned_node(own.variable, Partitioning(partitioning.axis, sizes), synchronizers_of(own)[: len(sizes)])


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
    if seen.of_places is None:
        kernels = KERNELS[: 1 + next(k for k, one in enumerate(KERNELS) if isinstance(one, CopyForPlaces))]
        run_pipeline(kernels, step, context, seen)
    assert seen.sharded is not None and seen.of_places is not None, "recorded behind the kernels"
    replicas, of_replica = len(context.local_replicas), {}
    for name, shape in shapes.items():
        axis, lengths = step.inputs.get(name), list(shape)
        if axis is not None and lengths:
            lengths[axis] = -(-lengths[axis] // replicas)
        of_replica[name] = tuple(lengths)
    placement = None
    if context.goes_through_stages(step):
        if seen.replicated is None:
            kernels = KERNELS[: 1 + next(k for k, one in enumerate(KERNELS) if isinstance(one, Replicate))]
            run_pipeline(kernels, step, context, seen)
        assert seen.replicated is not None, "recorded behind the kernels"
        placement = StagePlacement(seen.replicated, context)
    return MeshCosts(context.strategy, step, seen.sharded, seen.of_places, of_replica, placement)
