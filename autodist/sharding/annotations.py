"""Annotations: the shardings that a step's script and strategy request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autodist.sharding.mesh import Mesh
from autodist.sharding.spec import Sharding


@dataclass(frozen=True)
class Origin:
    """The place where an annotation is written.

    Attributes:
        text: for messages: "cluster.yml:12", "the layout-map key '.*/kernel'", "train.py:7".
    """

    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Constraint:
    """A sharding that readers of a tensor see; its node is an Identity of the tensor.

    Attributes:
        sharding: of the node's result.
        origin: the place where it is written.
    """

    sharding: Sharding
    origin: Origin


@dataclass(frozen=True)
class Annotations:
    """The requested shardings of one step.

    Attributes:
        meshes: by name. Before `lift-meshes`, several names may stand for one mesh.
        variables: by name of the variable.
        constraints: by name of the node.
        groups: tensors that are sharded alike, each a sharding group.
    """

    meshes: Mapping[str, Mesh]
    variables: Mapping[str, Constraint] = field(default_factory=dict)
    constraints: Mapping[str, Constraint] = field(default_factory=dict)
    groups: tuple[tuple[str, ...], ...] = ()
