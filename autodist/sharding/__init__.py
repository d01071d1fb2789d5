"""Sharding: meshes of places, and the division of tensors over the axes of a mesh."""

from autodist.sharding.annotations import (
    Annotations,
    Constraint,
    DataFlowEdge,
    ManualCollective,
    ManualRegion,
    Origin,
    ShardingGroup,
    in_function,
)
from autodist.sharding.mesh import Axis, Mesh
from autodist.sharding.spec import OPEN, WHOLE, Dim, Layout, Sharding
from autodist.sharding.text import lines_of

__all__ = [
    "OPEN",
    "WHOLE",
    "Annotations",
    "Axis",
    "Constraint",
    "DataFlowEdge",
    "Dim",
    "Layout",
    "ManualCollective",
    "ManualRegion",
    "Mesh",
    "Origin",
    "Sharding",
    "ShardingGroup",
    "in_function",
    "lines_of",
]
