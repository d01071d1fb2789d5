"""RemoveSizeOneAxes: removes axes of size 1, which divide nothing, from shardings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from autodist.graph.step import CapturedStep
from autodist.kernels.base import Context, Kernel
from autodist.kernels.shard.annotated import annotated, with_annotations
from autodist.sharding import Constraint, ManualRegion


@dataclass(frozen=True)
class RemoveSizeOneAxes(Kernel[CapturedStep, CapturedStep]):
    """Removes axes of size 1 from shardings and manual regions, so that they cause no conflicts in propagation.

    The mesh keeps them.

        [a·b, c?] !a    becomes    [b, ?]    with    {a: 1, b: 2, c: 1}
    """

    name: ClassVar[str] = "remove-size-one-axes"
    after: ClassVar[Mapping[str, str]] = {
        "lift-meshes": "shardings name a mesh of the table after it",
    }

    def apply(self, step: CapturedStep, context: Context) -> CapturedStep:
        annotations = annotated(step)
        if annotations is None:
            return step
        gone = {name: {a.name for a in mesh.axes if a.size == 1} for name, mesh in annotations.meshes.items()}

        def removed(one: Constraint) -> Constraint:
            return replace(one, sharding=one.sharding.without(gone[one.sharding.mesh]))

        def without(region: ManualRegion) -> ManualRegion:
            alone = set().union(*gone.values())
            axes = tuple(axis for axis in region.axes if axis not in alone)
            collectives = {name: one for name, one in region.collectives.items() if {*one.result.sharding.used()}}
            return replace(region, axes=axes, collectives=collectives)

        made = annotations.map(removed)
        regions = {name: without(region) for name, region in made.regions.items()}
        return with_annotations(step, replace(made, regions=regions))
