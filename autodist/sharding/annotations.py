"""Annotations: the shardings that a step's script and strategy request, and those that the passes derive from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

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
    """A requested sharding, and the place where it is written.

    Attributes:
        sharding: the sharding.
        origin: the place where it is written.
        mesh: the mesh that is written with it; None: the one that `sharding` names. `lift-meshes` moves it to the
            table.
    """

    sharding: Sharding
    origin: Origin
    mesh: Mesh | None = None


@dataclass(frozen=True)
class ShardingGroup:
    """Tensors and variables that are sharded alike. Source: the sharding group of Shardy.

    Attributes:
        members: names of variables, and of tensors ("x:0").
        origins: the places where it is written.
    """

    members: tuple[str, ...]
    origins: tuple[Origin, ...]


@dataclass(frozen=True)
class ManualCollective:
    """A collective that the script calls in a manual region: an Identity that changes the division of its operand.

    Attributes:
        kind: "all_reduce", "all_gather", "reduce_scatter" or "all_to_all"; empty for the gradient of one, which may
            take any transfers.
        operand: the sharding of the operand; None: any.
        result: the sharding of the result.
    """

    kind: str
    operand: Sharding | None
    result: Constraint


@dataclass(frozen=True)
class ManualRegion:
    """Nodes that the script wrote for a single place, with collectives of its own along some axes.

    An operand enters the region through an Identity node, its input, and a result leaves it through another one, its
    output. The shardings of both are those outside. Source: the manual computation of Shardy.

    Attributes:
        axes: the manual axes. `complete-manual-regions` sorts them in mesh order.
        inputs: the sharding of each operand, by name of its Identity node.
        outputs: the sharding of each result, by name of its Identity node.
        body: the other nodes of the region.
        origin: the place where it is written.
        collectives: those of the body and of its gradient, by name of their Identity nodes.
    """

    axes: tuple[str, ...]
    inputs: Mapping[str, Constraint]
    outputs: Mapping[str, Constraint]
    body: frozenset[str]
    origin: Origin
    collectives: Mapping[str, ManualCollective] = field(default_factory=dict)

    @property
    def exact(self) -> dict[str, Constraint]:
        """The shardings of the results of inputs, outputs and collectives, by name of their Identity nodes."""
        return {**self.inputs, **self.outputs, **{name: one.result for name, one in self.collectives.items()}}


@dataclass(frozen=True)
class DataFlowEdge:
    """Tensors that are sharded alike because the value of one of the sources is the value of each target.

    Propagation treats it like an Identity with the sources as operands and the targets as results, in both directions.
    A tensor of a function is named by `in_function`. Source: the data-flow edge of Shardy.

    Attributes:
        owner: the name of the variable, or the first target.
        sources: the tensors whose values flow in.
        targets: the tensors that have these values; each is a target of one edge only.
        constraint: the sharding of all of them, with the place of the annotation that it comes from; None: unknown.
    """

    owner: str
    sources: tuple[str, ...]
    targets: tuple[str, ...]
    constraint: Constraint | None = None

    @property
    def sharding(self) -> Sharding | None:
        return self.constraint.sharding if self.constraint else None


def in_function(function: str, tensor: str) -> str:
    """Returns the name of a tensor of a function; no tensor of a graph has an "@" in its name.

    >>> in_function("while_body_12", "h:0")
    'while_body_12@h:0'
    """
    return f"{function}@{tensor}"


@dataclass(frozen=True)
class Annotations:
    """The requested shardings of one step.

    Attributes:
        meshes: by name. Before `lift-meshes`, several names may stand for one mesh.
        variables: by name of the variable.
        constraints: by name of the node, an Identity. Its result has the sharding; readers of its operand may not.
        groups: the sharding groups, by number. After `unite-groups`, they are disjoint and numbered from 0.
        mesh_origins: the places where the meshes of the table are written.
        tensors: shardings of tensors ("x:0") that `apply-constraints` and `unite-groups` derive.
        regions: the manual regions, by name.
        edges: the data-flow edges.
        barriers: Identity nodes through which no sharding propagates. Source: the propagation barrier of Shardy.
        whole: maps tensors that stay whole since no sharding propagates to them, such as lists of tensors, to the
            reason.
        missing: annotations of variables and nodes that the step does not have.
    """

    meshes: Mapping[str, Mesh]
    variables: Mapping[str, Constraint] = field(default_factory=dict)
    constraints: Mapping[str, Constraint] = field(default_factory=dict)
    groups: Mapping[int, ShardingGroup] = field(default_factory=dict)
    mesh_origins: Mapping[str, Origin] = field(default_factory=dict)
    tensors: Mapping[str, Constraint] = field(default_factory=dict)
    regions: Mapping[str, ManualRegion] = field(default_factory=dict)
    edges: tuple[DataFlowEdge, ...] = ()
    barriers: frozenset[str] = frozenset()
    whole: Mapping[str, str] = field(default_factory=dict)
    missing: Mapping[str, Constraint] = field(default_factory=dict)

    def requests(self) -> Iterator[tuple[str, Constraint]]:
        """Yields each sharding with a description of the thing that has it, in the order of their creation."""
        yield from ((f"the variable {name}", one) for name, one in self.variables.items())
        yield from ((f"the constraint {name}", one) for name, one in self.constraints.items())
        yield from ((f"the tensor {name}", one) for name, one in self.tensors.items())
        for region in self.regions.values():
            yield from ((f"the input {name}", one) for name, one in region.inputs.items())
            yield from ((f"the output {name}", one) for name, one in region.outputs.items())
            yield from ((f"the collective {name}", one.result) for name, one in region.collectives.items())
        yield from ((f"the edge of {edge.owner}", edge.constraint) for edge in self.edges if edge.constraint)

    def map(self, change: Callable[[Constraint], Constraint]) -> Annotations:
        """Returns the annotations with each sharding replaced; the same object if none changes."""

        def changed(constraints: Mapping[str, Constraint]) -> dict[str, Constraint]:
            return {name: change(one) for name, one in constraints.items()}

        def with_sharding(one: ManualCollective) -> ManualCollective:
            operand = None if one.operand is None else change(replace(one.result, sharding=one.operand)).sharding
            return replace(one, operand=operand, result=change(one.result))

        regions = {
            name: replace(
                region,
                inputs=changed(region.inputs),
                outputs=changed(region.outputs),
                collectives={node: with_sharding(one) for node, one in region.collectives.items()},
            )
            for name, region in self.regions.items()
        }
        edges = tuple(
            replace(edge, constraint=change(edge.constraint)) if edge.constraint else edge for edge in self.edges
        )
        made = replace(
            self,
            variables=changed(self.variables),
            constraints=changed(self.constraints),
            tensors=changed(self.tensors),
            regions=regions,
            edges=edges,
        )
        return self if made == self else made

    def with_tensor(self, name: str, one: Constraint) -> Annotations:
        """Returns the annotations with the sharding of one more tensor."""
        return replace(self, tensors={**self.tensors, name: one})

    def reached(self) -> dict[Origin, tuple[str, ...]]:
        """Returns the variables and tensors that each annotation has reached so far, by its place; empty for none."""
        found: dict[Origin, dict[str, None]] = {one.origin: {} for one in self.missing.values()}
        for _, one in self.requests():
            found.setdefault(one.origin, {})
        marked = [self.constraints, *(region.exact for region in self.regions.values())]
        results = ({f"{name}:0": one for name, one in markers.items()} for markers in marked)
        for constraints in (self.variables, *results, self.tensors):
            for name, one in constraints.items():
                found[one.origin][name] = None
        for edge in self.edges:
            if edge.constraint:
                found[edge.constraint.origin].update(dict.fromkeys((edge.owner, *edge.sources, *edge.targets)))
        return {origin: tuple(names) for origin, names in found.items()}
