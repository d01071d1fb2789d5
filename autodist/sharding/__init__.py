"""Sharding: meshes of places, and the division of tensors over the axes of a mesh."""

from autodist.sharding.annotations import Annotations, Constraint, Origin
from autodist.sharding.mesh import Axis, Mesh
from autodist.sharding.spec import OPEN, WHOLE, Dim, Sharding

__all__ = ["OPEN", "WHOLE", "Annotations", "Axis", "Constraint", "Dim", "Mesh", "Origin", "Sharding"]
