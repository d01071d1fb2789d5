"""Holders on a mesh: the groups of the whole run between two steps, and those of a row within a step.

The workers of a row along the data axis have equal coordinates on the other axes. Within a step, they hold one part of
each variable, as if it were the whole. This part may be partitioned among them. Between two steps, the holder of a
variable has all parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import ClassVar

from autodist.graph.parts import Variable
from autodist.graph.step import CapturedStep, ReplicatedStep, StepWithOwners
from autodist.kernels.base import Context, Kernel
from autodist.placement.group import Group, Place
from autodist.placement.holder import Holder, Slice
from autodist.placement.partitioning import Partitioning, even_sizes, part_name, shard_name
from autodist.sharding import Mesh, Sharding


@dataclass(frozen=True)
class HoldInRows(Kernel[CapturedStep, CapturedStep]):
    """Restricts the holders that earlier steps have set to the row of this worker along the data axis of a mesh.

    The result has the form of the holders that a strategy sets: slices of whole variables, without division over other
    axes.
    """

    name: ClassVar[str] = "hold-in-rows"

    def apply(self, step: CapturedStep, context: Context) -> CapturedStep:
        if context.mesh is None or not step.holders:
            return step
        shapes = {variable.name: variable.shape for variable in step.variables}
        row = context.row_group.places
        in_row = {name: _in_row(one, shapes[name], row) for name, one in step.holders.items() if name in shapes}
        return replace(step, holders={name: one for name, one in in_row.items() if one is not None})


@dataclass(frozen=True)
class HoldOnMesh(Kernel[ReplicatedStep, ReplicatedStep]):
    """Sets the holders that the variables of a mesh have between two steps, which later steps and the script read."""

    name: ClassVar[str] = "hold-on-mesh"
    after: ClassVar[Mapping[str, str]] = {
        "read-remote-variables": "within a step, the holders are those of a row",
    }

    def apply(self, step: ReplicatedStep, context: Context) -> ReplicatedStep:
        if context.mesh is None:
            return step
        return replace(step, holders=holders_on_mesh(step, context))


def _in_row(holder: Holder, shape: Sequence[int], row: Sequence[Place]) -> Holder | None:
    """Returns the holder of a variable within a row of places; None if each of them holds its part."""
    slices = [one for one in holder.slices if one.group.is_all or any(place in one.group.places for place in row)]
    held = [[place for place in row if one.group.is_all or place in one.group.places] for one in slices]
    groups = [Group.of_workers(dict.fromkeys(place.worker for place in places)) for places in held]
    if len(slices) == 1:
        is_everywhere = len(held[0]) == len(row)
        return None if is_everywhere else replace(Holder.whole(shape, groups[0]), layer=holder.layer)
    axis = next(a for a, (one, other) in enumerate(zip(slices[0].begin, slices[1].begin, strict=True)) if one != other)
    partitioning = Partitioning(axis, even_sizes(shape[axis], len(slices)))
    return replace(Holder.partitioned(shape, partitioning, groups), layer=holder.layer).with_copies_of(holder)


def holder_of_part(holder: Holder, part: Variable) -> Holder:
    """Returns the holder of a part of a variable within a row, for the holder of the whole variable."""
    whole, groups = holder.partitioning, [one.group for one in holder.slices]
    if whole is None:
        return replace(Holder.whole(part.shape, groups[0]), layer=holder.layer)
    length = part.shape[whole.axis]
    sizes = whole.sizes if sum(whole.sizes) == length else even_sizes(length, len(groups))
    made = Holder.partitioned(part.shape, Partitioning(whole.axis, sizes), groups[: len(sizes)])
    return replace(made, layer=holder.layer).with_copies_of(holder)


def holders_on_mesh(step: StepWithOwners, context: Context) -> dict[str, Holder]:
    """Returns the holders between two steps of the variables that a mesh divides along any axis, by name."""
    assert context.mesh is not None, "only a mesh divides variables"
    parts = {variable.name: Holder.whole(variable.shape, context.row_group) for variable in step.variables}
    parts |= {name: one.with_copies(name, context.plan.cached_copies) for name, one in step.holders.items()}
    undivided = Sharding(())
    return {
        name: _on_mesh(parts[name], step.shardings.get(name, undivided), context)
        for name in divided_variables(step, context)
    }


def divided_variables(step: StepWithOwners, context: Context) -> list[str]:
    """Returns the captured names of the variables that a mesh divides along any axis."""
    parts = {part_name(name, k) for name in step.shardings for k in range(1, len(context.coordinates))}
    return [name for name in dict.fromkeys([*step.shardings, *step.holders]) if name not in parts]


def part_index(mesh: Mesh, place: int, sharding: Sharding) -> int:
    """Returns the position of a place's part among the parts of a divided variable, in row-major order."""
    part = 0
    for axes in sharding.axes:
        part = part * mesh.count(axes) + mesh.index(place, axes)
    return part


def _on_mesh(part: Holder, sharding: Sharding, context: Context) -> Holder:
    """Returns the holder of a variable whose part has a holder within each row."""
    assert context.mesh is not None, "only a mesh divides variables"
    counts = [context.mesh.count(axes) for axes in sharding.axes] or [1] * len(part.shape)
    members: dict[int, list[int]] = {}
    for place in context.mesh.coordinates:
        members.setdefault(part_index(context.mesh, place, sharding), []).append(place)
    starts = product(*(range(0, n * count, n) for n, count in zip(part.shape, counts, strict=True)))
    slices = [
        Slice(
            one.name + (shard_name("", index) if sharding.divides else ""),
            tuple(map(sum, zip(start, one.begin, strict=True))),
            one.shape,
            _group_of(one, members[index], context),
            one.copies,
            is_on_places=sharding.divides,
        )
        for index, start in enumerate(starts)
        for one in part.slices
    ]
    along = {axis for axis, count in enumerate(counts) if count > 1}
    is_divided_twice = along and part.axis is not None
    axes = [part.axis] if part.axis is not None else [*along]
    slices.sort(key=lambda one: one.begin)
    return Holder(tuple(slices), axes[0] if len(axes) == 1 and not is_divided_twice else None, part.layer)


def _group_of(one: Slice, members: Sequence[int], context: Context) -> Group:
    """Returns the places that hold a slice of a part, of the places that have the part."""
    mesh, places = context.mesh, context.strategy.mesh.places
    assert mesh is not None, "only a mesh divides variables"
    coordinates = {k for k, place in enumerate(context.row) if place.worker in one.group}
    held = [place for place in members if mesh.index(place, context.row_axes) in coordinates]
    return Group(tuple(Place(places[place].worker, places[place].device) for place in held))
