"""Mesh: divides tensors over the axes of a mesh of places."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, permutations, zip_longest
from typing import Annotated, Literal

from pydantic import Field

from autodist.errors import StrategyError
from autodist.logs.formatting import listed, nearest
from autodist.options.fields import OptionError
from autodist.proto import strategy_pb2
from autodist.resources import ResourceSpec
from autodist.sharding import WHOLE, Axis, Dim, Layout, Sharding
from autodist.sharding import Mesh as MeshOfPlaces
from autodist.strategies.all_reduce import AllReduceOptions, all_reduce_nodes
from autodist.strategies.base import StrategyBuilder, make_strategy
from autodist.strategies.mesh_data import nodes_in_slices, nodes_with_slots_in_slices, owners_in_rows
from autodist.strategies.registry import register
from autodist.strategies.variables import GraphLike, synced_variables

log = logging.getLogger("autodist.strategies")


@register
@dataclass(frozen=True)
class Mesh(StrategyBuilder):
    """Divides tensors over the axes of a mesh of places: tensor parallelism, together with data parallelism.

    For layers that are too large for one device, or whose gradients are too large to send. Each variable with a layout
    is divided; all other shardings follow: those of biases, of slots, of activations and of gradients. Each place
    computes its parts, and the places of a row exchange the tensors that an operation needs in another division. Places
    that differ on the data axis have different parts of the batch, and sum their gradients.

    Cost: a layer that is divided along the columns of one matrix and the rows of the next sends one sum of activations
    forward and one backward. Over the data axis, each place sends the gradients of its parts only.

    Source: Y. Xu et al., "GSPMD: General and Scalable Parallelization for ML Computation Graphs", 2021; M. Shoeybi et
    al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism", 2019.

    Attributes:
        mesh: the size of each axis, by name. The last axis varies fastest, so its places are neighbours. At most one
            size may be -1: as many as there are places for.
        data: the axis along which the batch is divided. If the mesh has no such axis, all places have the whole batch.
        layouts: for each pattern (a regular expression), the layout of the variables whose whole names it matches; in
            YAML, `sharding:` of a pattern under `variables:`. The data axis divides a variable, its gradient and its
            slots among the places that differ on it; its value is gathered shortly before it is used.
        slots: for each pattern, the data axis, which divides the optimizer's slots and the updates of the variables
            that it matches, while each place has their whole values (ZeRO stage 1); in YAML, `slots:` of a pattern
            under `variables:`.
        priorities: for each pattern of layouts, a number for each dimension: where two layouts compete, the one of the
            lower number comes first; 0 without an entry. In YAML, `priority:` of a pattern under `variables:`.
        tensors: layouts of tensors, by pattern of the names of the nodes that compute them; in YAML, `sharding:` of a
            pattern under `tensors:`.
        alike: for each group, patterns of variables of one shape that are divided alike.
        prefetch: the number of layers with variables divided by the data axis that are gathered ahead of the layer
            that computes.
        compare_every: the number of training steps after which workers compare their copies of variables, by checksums.
            Workers that round differently would drift apart: a warning then names the variables, and the copies are
            made equal. 0: never.
    """

    mesh: dict[str, int] = field(default_factory=lambda: {"data": -1})
    data: str = "data"
    layouts: dict[str, tuple[str | tuple[str, ...] | None, ...]] = field(default_factory=dict)
    slots: dict[str, str] = field(default_factory=dict)
    priorities: dict[str, tuple[int | None, ...]] = field(default_factory=dict)
    tensors: dict[str, tuple[str | tuple[str, ...] | None, ...]] = field(default_factory=dict)
    alike: tuple[tuple[str, ...], ...] = ()
    prefetch: Literal[0, 1] = 1
    compare_every: Annotated[int, Field(ge=0, lt=2**31)] = 1000

    def __post_init__(self) -> None:
        super().__post_init__()
        wrong = [name for name, size in self.mesh.items() if size < 1 and size != -1]
        if wrong or list(self.mesh.values()).count(-1) > 1 or not self.mesh:
            raise OptionError(
                "mesh",
                f"mesh is {dict(self.mesh)!r}: give each axis a size of at least 1. One may be -1, for all places "
                "that are left.",
            )
        for pattern, layout in (*self.layouts.items(), *self.tensors.items()):
            self._check(pattern, layout)
        for pattern, axis in self.slots.items():
            self._check_slots(pattern, axis)
        for pattern in chain(*self.alike):
            _check_pattern(pattern)
        for pattern, numbers in self.priorities.items():
            self._check_priority(pattern, numbers)

    def arranged(self, resource_spec: ResourceSpec) -> ResourceSpec:
        """Returns the machines with the places of one row along the data axis as replicas.

        Raises:
            StrategyError: the mesh does not have as many places as the machines, or those of a worker are no block.
        """
        idle = next((worker for worker in resource_spec.workers if not worker.has_replicas), None)
        if idle is not None:
            raise OptionError("mesh", f"{idle.name} has no device, so it has no place on the mesh: leave it out.")
        mesh = self.of_places(resource_spec)
        blocks = self._blocks(mesh, resource_spec)
        return resource_spec.with_mesh_rows(
            list(dict.fromkeys(mesh.row(block[0], self._data_axes) for block in blocks))
        )

    def _blocks(self, mesh: MeshOfPlaces, resource_spec: ResourceSpec) -> list[list[int]]:
        """Returns the places of each worker, which are a block of the mesh.

        Raises:
            OptionError: a worker lacks a place that it needs for its parts of the batch, or of the variables.
        """
        blocks: dict[int, list[int]] = {}
        for index, place in enumerate(_places(resource_spec)):
            blocks.setdefault(place.worker, []).append(index)
        worker = self._without_block(mesh, blocks)
        if worker is not None:
            orders = (MeshOfPlaces(axes) for axes in permutations(mesh.axes))
            fitting = next((other for other in orders if self._without_block(other, blocks) is None), None)
            hint = f"Write `mesh: {fitting}`, in which they are blocks" if fitting else "Change the sizes"
            raise OptionError(
                "mesh",
                f"the devices of worker {worker} are no block of the mesh {mesh}. A worker needs each of its "
                f"coordinates on {self.data!r} with each of those on the other axes, and two workers have all "
                f"or none of them in common. {hint}, or start a worker for each device: set `gpus_per_worker` or "
                "`workers`, or pass --workers.",
            )
        return list(blocks.values())

    def _without_block(self, mesh: MeshOfPlaces, blocks: Mapping[int, list[int]]) -> int | None:
        """Returns a worker whose places are no block of a mesh; None if those of all workers are."""
        for axes in (self._data_axes, self._other_axes):
            known: dict[int, frozenset[int]] = {}
            for worker, block in blocks.items():
                own = frozenset(mesh.index(place, axes) for place in block)
                rows = {frozenset(mesh.row(place, axes)) & {*block} for place in block}
                if {len(row) for row in rows} != {len(own)} or any(known.get(k, own) != own for k in own):
                    return worker
                known.update(dict.fromkeys(own, own))
        return None

    def build(self, graph_item: GraphLike, resource_spec: ResourceSpec) -> strategy_pb2.Strategy:
        variables = synced_variables(graph_item)
        shapes = {variable.name: variable.shape for variable in graph_item.variables}
        own = [*self._shardings(shapes, self.of_places(resource_spec))]
        shardings = self._requested(graph_item, own)
        in_slices = self._nodes_in_slices(graph_item, resource_spec, shardings)
        with_slots = self._nodes_with_slots_in_slices(graph_item, resource_spec, shardings)
        owned = in_slices | with_slots
        others = all_reduce_nodes([v for v in variables if v.name not in owned], AllReduceOptions())
        strategy = make_strategy(type(self).__name__, resource_spec, variables, [*others, *owned.values()])
        strategy.mesh.CopyFrom(self.message(resource_spec, own))
        strategy.prefetch = self.prefetch if in_slices else 0
        self._warn_of_tensors(list(getattr(getattr(graph_item, "graph_index", None), "nodes", ())))
        return strategy

    def _requested(self, graph_item: GraphLike, own: Iterable[strategy_pb2.VariableSharding]) -> dict[str, Sharding]:
        """Returns the shardings that the script or these layouts request, by variable."""
        annotations = getattr(graph_item, "annotations", None)
        found = {} if annotations is None else {name: one.sharding for name, one in annotations.variables.items()}
        return found | {one.variable: Sharding.parse(one.sharding) for one in own}

    def _nodes_in_slices(
        self, graph_item: GraphLike, resource_spec: ResourceSpec, shardings: Mapping[str, Sharding]
    ) -> dict[str, strategy_pb2.VariableNode]:
        """Returns the nodes of the variables that the data axis divides."""
        mesh = self.of_places(resource_spec)
        if mesh.sizes.get(self.data, 1) == 1 or not any(self.data in one.used() for one in shardings.values()):
            return {}
        return nodes_in_slices(graph_item, shardings, self.data, self._owners(resource_spec))

    def _nodes_with_slots_in_slices(
        self, graph_item: GraphLike, resource_spec: ResourceSpec, shardings: Mapping[str, Sharding]
    ) -> dict[str, strategy_pb2.VariableNode]:
        """Returns the nodes of the variables whose slots the data axis divides.

        Raises:
            StrategyError: an axis divides, or may divide, the value of one of them as well.
        """
        matched = {v.name: pattern for v in graph_item.variables if (pattern := _first_match(self.slots, v.name))}
        for name, pattern in matched.items():
            if any(dim != WHOLE for dim in shardings[name].dims):
                raise StrategyError(
                    f"{pattern!r} has slots: {self.data}, which keeps the whole value of {name} at each place, but its "
                    f"sharding is {shardings[name]}. Remove slots, or the axes of the sharding. To divide the slots "
                    f"by several axes, divide the variable with them: the sharding may have {self.data!r} as well."
                )
        if not matched or self.of_places(resource_spec).sizes[self.data] == 1:
            return {}
        return nodes_with_slots_in_slices(graph_item, matched, self._owners(resource_spec))

    def _owners(self, resource_spec: ResourceSpec) -> list[int]:
        """Returns the coordinates along the data axis of the owners of slices."""
        workers = [place.worker for place in _places(resource_spec)]
        return owners_in_rows(self.of_places(resource_spec), workers, self.data)

    def message_for(self, graph_item: GraphLike, resource_spec: ResourceSpec) -> strategy_pb2.Mesh:
        """Returns the mesh in a strategy, with the shardings of the variables of a step."""
        shapes = {variable.name: variable.shape for variable in graph_item.variables}
        return self.message(resource_spec, self._shardings(shapes, self.of_places(resource_spec)))

    def message(
        self, resource_spec: ResourceSpec, shardings: Iterable[strategy_pb2.VariableSharding] = ()
    ) -> strategy_pb2.Mesh:
        """Returns the mesh in a strategy."""
        mesh = self.of_places(resource_spec)
        return strategy_pb2.Mesh(
            axes=[strategy_pb2.MeshAxis(name=axis.name, size=axis.size) for axis in mesh.axes],
            data=self.data if self.data in self.mesh else "",
            places=_places(resource_spec),
            compare_every=self.compare_every,
            variables=shardings,
            tensors=[
                strategy_pb2.TensorSharding(pattern=pattern, sharding=str(Sharding(tuple(map(Dim.of, layout)))))
                for pattern, layout in self.tensors.items()
            ],
            alike=[strategy_pb2.AlikeVariables(patterns=patterns) for patterns in self.alike],
        )

    def of_places(self, resource_spec: ResourceSpec) -> MeshOfPlaces:
        """Returns the mesh over the places of some machines.

        Raises:
            OptionError: the sizes do not fit.
        """
        places = len(_places(resource_spec))
        sizes = {name: places // self._known_size if size == -1 else size for name, size in self.mesh.items()}
        mesh = MeshOfPlaces(tuple(Axis(name, size) for name, size in sizes.items()))
        if mesh.size != places or 0 in sizes.values():
            raise OptionError(
                "mesh",
                f"the mesh {dict(self.mesh)!r} has {mesh.size} places, but the workers have {places} devices: change "
                "the sizes of its axes, or the number of workers.",
            )
        return mesh

    def whole_rows(self, devices: Sequence[int]) -> int:
        """Returns how many of the first machines form a mesh, as many as possible; 0 if none do.

        With a size of -1, the last machines are left out if their devices are no whole row of the other axes.

        Args:
            devices: the number of devices of each machine.
        """
        row, may_grow = self._known_size, -1 in self.mesh.values()
        totals = [0, *accumulate(devices)]
        fitting = (k for k, total in enumerate(totals) if total == row or (total and may_grow and total % row == 0))
        return max(fitting, default=0)

    def unmatched(self, names: Iterable[str]) -> list[str]:
        """Returns the patterns of variables that match none of these names."""
        variables = list(names)
        patterns = {*self.layouts, *self.slots, *chain(*self.alike)}
        return sorted(p for p in patterns if not any(re.fullmatch(p, name) for name in variables))

    def _warn_of_tensors(self, names: Sequence[str]) -> None:
        for pattern in self.tensors if names else ():
            if not any(re.fullmatch(pattern, name) for name in names):
                log.warning(
                    "The pattern %r of `tensors` matches no node of this step (it must match the whole name). Near "
                    "nodes: %s.", pattern, listed(nearest(pattern, names)),
                )  # fmt: skip

    def _shardings(
        self, shapes: Mapping[str, Sequence[int]], mesh: MeshOfPlaces
    ) -> Iterator[strategy_pb2.VariableSharding]:
        for name, shape in shapes.items():
            matching = [pattern for pattern in self.layouts if re.fullmatch(pattern, name)]
            if len(matching) > 1 and len({self.layouts[pattern] for pattern in matching}) > 1:
                raise StrategyError(
                    f"the patterns {listed(map(repr, matching))} match {name} and divide it differently: change them "
                    "so that one of them matches it."
                )
            if not matching and (own := _first_match(self.slots, name)):
                whole = Sharding((WHOLE,) * len(shape))
                yield strategy_pb2.VariableSharding(variable=name, sharding=str(whole), origin=repr(own))
            if matching:
                sharding = self._sharding(matching[0], name, shape, mesh)
                yield strategy_pb2.VariableSharding(variable=name, sharding=str(sharding), origin=repr(matching[0]))
        for pattern in self.unmatched(shapes):
            log.warning(
                "The pattern %r matches no variable of this step (it must match the whole name). Near "
                "variables: %s.", pattern, listed(nearest(pattern, list(shapes))),
            )  # fmt: skip

    def _sharding(self, pattern: str, name: str, shape: Sequence[int], mesh: MeshOfPlaces) -> Sharding:
        layout = self.layouts[pattern]
        if len(layout) > len(shape):
            raise StrategyError(
                f"the layout {list(layout)} of {pattern!r} has {len(layout)} dimensions, but {name} has the shape "
                f"{list(shape)}: leave some out."
            )
        dims = [*map(Dim.of, layout), *[WHOLE] * (len(shape) - len(layout))]
        for length, dim in zip(shape, dims, strict=True):
            count = mesh.count(axis for axis in dim.axes if axis != self.data)  # slices along it may be uneven
            if length % count:
                raise StrategyError(
                    f"the layout {list(layout)} of {pattern!r} divides a dimension of {length} elements of {name} into "
                    f"{count} parts, which does not go: change its layout, or the size of the axis."
                )
        priorities = self.priorities.get(pattern, ())
        if len(priorities) > len(shape):
            raise StrategyError(
                f"the priority {list(priorities)} of {pattern!r} has {len(priorities)} numbers, but {name} has the "
                f"shape {list(shape)}: leave some out."
            )
        numbered = zip_longest(dims, priorities)
        return Sharding(
            tuple(replace(dim, priority=number if dim.axes or dim.is_open else None) for dim, number in numbered)
        )

    def _check(self, pattern: str, layout: Layout) -> None:
        _check_pattern(pattern)
        axes = [axis for dim in map(Dim.of, layout) for axis in dim.axes]
        unknown = next((axis for axis in axes if axis not in self.mesh), None)
        if unknown is not None:
            raise StrategyError(
                f"the layout of {pattern!r} names the axis {unknown!r}, but the mesh has the axes {listed(self.mesh)}."
            )
        twice = next((axis for axis in axes if axes.count(axis) > 1), None)
        if twice is not None:
            raise StrategyError(f"the layout of {pattern!r} names the axis {twice!r} twice; it divides one dimension.")

    def _check_slots(self, pattern: str, axis: str) -> None:
        _check_pattern(pattern)
        if axis not in self.mesh:
            raise StrategyError(
                f"the slots of {pattern!r} name the axis {axis!r}, but the mesh has the axes {listed(self.mesh)}."
            )
        if axis != self.data:
            raise StrategyError(
                f"the slots of {pattern!r} name the axis {axis!r}, but only the axis of the batch, {self.data!r}, "
                f"divides slots alone. Divide the variable with its slots by {axis!r} in `sharding`."
            )

    def _check_priority(self, pattern: str, numbers: Sequence[int | None]) -> None:
        if pattern not in self.layouts:
            raise StrategyError(f"the pattern {pattern!r} has a priority and no layout: add its `sharding`.")
        wrong = next((number for number in numbers if number is not None and number < 0), None)
        if wrong is not None:
            raise StrategyError(f"the priority of {pattern!r} has the number {wrong}; numbers begin with 0.")

    @property
    def _known_size(self) -> int:
        """The number of places, without an axis of size -1."""
        return math.prod(size for size in self.mesh.values() if size > 0)

    @property
    def _data_axes(self) -> list[str]:
        return [self.data] if self.data in self.mesh else []

    @property
    def _other_axes(self) -> list[str]:
        return [name for name in self.mesh if name != self.data]


def _check_pattern(pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise StrategyError(f"the pattern {pattern!r} is no regular expression: {error}.") from error


def _first_match(patterns: Iterable[str], name: str) -> str | None:
    """Returns the first pattern that matches the whole name."""
    return next((pattern for pattern in patterns if re.fullmatch(pattern, name)), None)


def _places(resource_spec: ResourceSpec) -> list[strategy_pb2.Replica]:
    """Returns the devices of all workers, in order."""
    return [
        strategy_pb2.Replica(worker=worker.index, device=device)
        for worker in resource_spec.workers
        for device in worker.devices
    ]
