"""LiftMeshes: collects the meshes of a step in one table; shardings refer to them by name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, count
from typing import ClassVar

from autodist.errors import StrategyError
from autodist.graph.manual_marks import regions_of
from autodist.graph.sharding_marks import constraints_of, groups_of
from autodist.graph.step import CapturedStep
from autodist.kernels.base import Context, Kernel
from autodist.kernels.shard.annotated import annotated, with_annotations
from autodist.kernels.shard.checked import checked
from autodist.logs.formatting import counted, listed
from autodist.sharding import OPEN, Annotations, Constraint, Mesh, Origin, Sharding, ShardingGroup

MESH = "mesh"
"""The name of a strategy's mesh in the table."""


@dataclass(frozen=True)
class LiftMeshes(Kernel[CapturedStep, CapturedStep]):
    """Moves meshes that are written with a sharding to the table, in which no two meshes are alike.

    The table begins with the mesh of the strategy, and the shardings of the strategy are among those of the variables.
    It also checks each sharding against its mesh and its tensor, and the mesh against the devices of the run.
    """

    name: ClassVar[str] = "lift-meshes"

    def apply(self, step: CapturedStep, context: Context) -> CapturedStep:
        annotations = annotated(step) if context.mesh is None else _with_strategy(step, context)
        if annotations is None:
            return step
        lifted = lift(annotations)
        _require_fitting(lifted, context)
        if context.has_stages_on_mesh:
            _require_no_stages(lifted, context.row_axes[0])
        return with_annotations(step, checked(step, lifted))


def lift(annotations: Annotations) -> Annotations:
    """Returns the annotations with one name for each mesh; of several names, the first remains.

    Raises:
        StrategyError: a sharding names a mesh that does not exist.
    """
    meshes: dict[str, Mesh] = {}
    name_of: dict[object, str] = {}
    for name, mesh in annotations.meshes.items():
        if name_of.setdefault(_content(mesh), name) == name:
            meshes[name] = mesh
    origins = {name: origin for name, origin in annotations.mesh_origins.items() if name in meshes}

    def lifted(one: Constraint) -> Constraint:
        mesh = one.mesh or annotations.meshes.get(one.sharding.mesh)
        if mesh is None:
            raise StrategyError(
                f"The sharding {one.sharding} ({one.origin}) names the mesh {one.sharding.mesh}, which is "
                "defined nowhere."
            )
        name = name_of.get(_content(mesh))
        if name is None:
            name = next(free for free in _names(mesh) if free not in meshes)
            name_of[_content(mesh)], meshes[name], origins[name] = name, mesh, one.origin
        return (
            one
            if one.mesh is None and one.sharding.mesh == name
            else Constraint(replace(one.sharding, mesh=name), one.origin)
        )

    made = annotations.map(lifted)
    return replace(made, meshes=meshes, mesh_origins=origins)


def _with_strategy(step: CapturedStep, context: Context) -> Annotations:
    """Returns the annotations of a step together with its marks, and the mesh and the shardings of the strategy.

    Raises:
        StrategyError: the script requests another sharding of a variable than the strategy.
    """
    assert context.mesh is not None, "only a mesh has shardings"
    given = step.annotations or Annotations({})
    data = context.strategy.mesh.data  # the nodes of the strategy divide variables along it
    variables = {name: replace(one, sharding=one.sharding.without([data])) for name, one in given.variables.items()}
    for one in context.strategy.mesh.variables:
        own = Constraint(Sharding.parse(one.sharding).without([data]), Origin(one.origin), context.mesh)
        other = variables.setdefault(one.variable, own)
        is_open = all(dim == OPEN for dim in own.sharding.dims)
        if not is_open and other.origin != own.origin and other.sharding.dims[: own.sharding.rank] != own.sharding.dims:
            raise StrategyError(
                f"The variable {one.variable} has two shardings, {own.sharding} ({own.origin}) and {other.sharding} "
                f"({other.origin}). Leave out one of them."
            )
    groups = (one for one in (*_alike(step, context), *groups_of(step.graph_index)) if one not in given.groups.values())
    return replace(
        given,
        meshes={MESH: context.mesh, **given.meshes},
        variables=variables,
        constraints={**given.constraints, **constraints_of(step.graph_index)},
        groups={**given.groups, **dict(enumerate(groups, max(given.groups, default=-1) + 1))},
        regions={**given.regions, **regions_of(step.graph_index)},
    )


def _alike(step: CapturedStep, context: Context) -> Iterator[ShardingGroup]:
    """Yields the groups of variables that the strategy requests."""
    for one in context.strategy.mesh.alike:
        members = [name for name in step.by_name if any(re.fullmatch(pattern, name) for pattern in one.patterns)]
        if len(members) > 1:
            yield ShardingGroup(tuple(members), (Origin(f"alike: {listed(map(repr, one.patterns))}"),))


def _content(mesh: Mesh) -> object:
    """Returns a value that alike meshes share: the axes in order, and the places."""
    return mesh.axes, mesh.places or tuple(range(mesh.size))


def _names(mesh: Mesh) -> Iterator[str]:
    """Yields the names that a new mesh of the table may have."""
    if not mesh.axes:
        yield f"place_{mesh.places[0]}"
    yield from chain(["mesh"], (f"mesh_{k}" for k in count()))


def _require_fitting(annotations: Annotations, context: Context) -> None:
    """Passes if there is one mesh with axes at most, and each of its places is a device of the run.

    Raises:
        StrategyError: there are several, or the devices differ.
    """
    shown = {name: f"{mesh}{_written(annotations.mesh_origins.get(name))}" for name, mesh in annotations.meshes.items()}
    with_axes = [name for name, mesh in annotations.meshes.items() if mesh.axes]
    if len(with_axes) > 1:
        first, second = (shown[name] for name in with_axes[:2])
        raise StrategyError(f"One step has two meshes, {first} and {second}. Use the same axes and places in both.")
    devices = f"the run has {counted(context.places, 'device')} on {counted(context.workers, 'worker')}"
    for name, mesh in annotations.meshes.items():
        if len(set(mesh.names)) < len(mesh.names):
            raise StrategyError(f"The mesh {shown[name]} has two axes of one name. Rename one of them.")
        if mesh.axes and mesh.size != context.places:
            raise StrategyError(
                f"The mesh {shown[name]} has {counted(mesh.size, 'place')}, but {devices}. Change the sizes of the "
                "axes or the devices, so that each device is one place."
            )
        strange = [place for place in mesh.places if not 0 <= place < context.places]
        if strange or len(set(mesh.places)) < len(mesh.places):
            fault = f"the place {strange[0]}, but {devices}" if strange else "a place twice"
            raise StrategyError(f"The mesh {shown[name]} has {fault}. Name each device of the run once, from 0.")


def _require_no_stages(annotations: Annotations, axis: str) -> None:
    """Passes if no tensor is divided along the axis of the pipeline stages.

    Raises:
        StrategyError: one is; the message names the place.
    """

    def checked_one(one: Constraint) -> Constraint:
        if axis in one.sharding.used():
            raise StrategyError(
                f"{one.origin} names the axis {axis!r} of the pipeline stages, but a stage divides its tensors along "
                "the other axes alone. Name the axis 'model' there, or leave the dimension whole."
            )
        return one

    annotations.map(checked_one)
    region = next((one for one in annotations.regions.values() if axis in one.axes), None)
    if region is not None:
        raise StrategyError(
            f"The manual region of {region.origin} has the axis {axis!r}, along which the model is divided into "
            "pipeline stages. Use another axis."
        )


def _written(origin: Origin | None) -> str:
    return f" ({origin})" if origin else ""
