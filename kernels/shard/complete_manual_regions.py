"""CompleteManualRegions: brings manual regions into a normal form, and refuses those that cannot be divided."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from autodist.errors import StrategyError
from autodist.graph.effects import Effects
from autodist.graph.names import node_of, tensor
from autodist.graph.step import CapturedStep
from autodist.kernels.base import Context, Kernel
from autodist.kernels.shard.annotated import annotated, sharding_of, with_annotations
from autodist.logs.formatting import did_you_mean, listed
from autodist.sharding import Annotations, Constraint, ManualRegion, Mesh


@dataclass(frozen=True)
class CompleteManualRegions(Kernel[CapturedStep, CapturedStep]):
    """Sorts the axes of each manual region in mesh order, and names each of them in each input and output sharding.

    Source: the cleanup of manual axes in Shardy.

        axes b, a, input [a, –]    becomes    axes a, b, input [a, –] !b
    """

    name: ClassVar[str] = "complete-manual-regions"
    after: ClassVar[Mapping[str, str]] = {
        "remove-size-one-axes": "an axis of size 1 needs no dimension",
        "split-constants": "a region has constants of its own after it",
    }

    def apply(self, step: CapturedStep, context: Context) -> CapturedStep:
        annotations = annotated(step)
        if annotations is None or not annotations.regions:
            return step
        regions = {
            name: _completed(step, annotations, name, one, context.strategy.mesh.data)
            for name, one in annotations.regions.items()
        }
        return with_annotations(step, replace(annotations, regions=regions))


def _completed(
    step: CapturedStep, annotations: Annotations, name: str, region: ManualRegion, data: str
) -> ManualRegion:
    """Returns a region in normal form.

    Raises:
        StrategyError: it has no normal form, or it reads a divided tensor that is not an input.
    """
    if data in region.axes:
        raise StrategyError(
            f"The manual region {name} ({region.origin}) has the axis {data}, along which the batch is divided. That "
            "is not supported: use another axis."
        )
    markers = {**region.inputs, **region.outputs}
    if not markers:
        if region.axes and region.body:
            raise StrategyError(
                f"The manual region {name} ({region.origin}) has axes and nodes, but neither inputs nor outputs. Pass "
                "the tensors that it reads as inputs."
            )
        return region
    mesh = annotations.meshes[next(iter(markers.values())).sharding.mesh]
    unknown = next((axis for axis in region.axes if axis not in mesh.names), None)
    if unknown is not None:
        raise StrategyError(
            f"The manual region {name} ({region.origin}) has the axis {unknown}, but the mesh {mesh} has "
            f"{listed(mesh.names)}.{did_you_mean(unknown, mesh.names)}"
        )
    for marker, one in markers.items():
        _require_divided(step, mesh, region, marker, one)
    for read, annotation in _divided_reads(step, annotations, region):
        raise StrategyError(
            f"The manual region {name} ({region.origin}) reads {read}, which has the sharding {annotation.sharding} "
            f"({annotation.origin}). Pass it as an input of the region."
        )

    def completed(one: Constraint) -> Constraint:
        unnamed = {*region.axes}.difference(one.sharding.used())
        return replace(one, sharding=replace(one.sharding, whole=mesh.ordered({*one.sharding.whole, *unnamed})))

    inputs, outputs = (
        {marker: completed(one) for marker, one in given.items()} for given in (region.inputs, region.outputs)
    )
    return replace(region, axes=mesh.ordered(region.axes), inputs=inputs, outputs=outputs)


def _require_divided(step: CapturedStep, mesh: Mesh, region: ManualRegion, marker: str, one: Constraint) -> None:
    """Passes if the manual axes of each dimension come first and divide its length."""
    shape = step.spec_of(tensor(marker)).shape
    lengths = shape.as_list() if shape.rank is not None else [None] * one.sharding.rank
    for dim, length in zip(one.sharding.dims, lengths):
        is_manual = [axis in region.axes for axis in dim.axes]
        if is_manual != sorted(is_manual, reverse=True):
            late = next(axis for k, axis in enumerate(dim.axes) if is_manual[k] and not all(is_manual[:k]))
            raise StrategyError(
                f"The sharding {one.sharding} of {marker} ({one.origin}) has the manual axis {late} behind the free "
                f"axis {dim.axes[is_manual.index(False)]}, but the manual region ({region.origin}) divides a dimension "
                "first. Exchange the two axes, or make both manual."
            )
        parts = mesh.count(axis for axis in dim.axes if axis in region.axes)
        if length is not None and length % parts:
            raise StrategyError(
                f"The sharding {one.sharding} of {marker} ({one.origin}), of shape {shape}, divides the length "
                f"{length} into {parts} parts of the manual region ({region.origin}), but it is not "
                "divisible. Change the length, or leave the dimension whole."
            )


def _divided_reads(
    step: CapturedStep, annotations: Annotations, region: ManualRegion
) -> Iterator[tuple[str, Constraint]]:
    """Yields the divided variables and tensors that a region reads without an input."""
    inside = {*region.body, *region.inputs, *region.outputs}
    effects = Effects(step.graph_def, step.graph_index.nodes)
    for reader in sorted(region.body):
        for name in step.graph_index.inputs(reader):
            handle = effects.handle_of(name) or _handle_read(step, effects, name, region)
            variable = step.by_handle.get(handle) if handle else None
            found = annotations.variables.get(variable.name) if variable else sharding_of(annotations, name)
            if found and found.sharding.divides and (variable or node_of(name) not in inside):
                yield variable.name if variable else name, found


def _handle_read(step: CapturedStep, effects: Effects, name: str, region: ManualRegion) -> str | None:
    """Returns the handle of the variable whose value a tensor is; None if the value enters by an input."""
    node = step.graph_index.nodes[node_of(name)]
    while node.op == "Identity" and node.name not in region.inputs:
        node = step.graph_index.nodes[node_of(node.input[0])]
    return effects.handle_of(node.input[0]) if node.op == "ReadVariableOp" else None
