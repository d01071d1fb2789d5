"""UniteGroups: unites sharding groups that share a member."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import tensorflow as tf

from autodist.errors import StrategyError
from autodist.graph.names import node_of, tensor
from autodist.graph.step import CapturedStep
from autodist.graph.step_editor import StepEditor
from autodist.kernels.base import Context, Kernel
from autodist.kernels.place.slots import find_slots
from autodist.kernels.shard.add_data_flow_edges import opened
from autodist.kernels.shard.annotated import annotated, put_identity, sharding_of
from autodist.logs.formatting import listed
from autodist.sharding import Annotations, Constraint, Sharding, ShardingGroup

log = logging.getLogger("autodist")


@dataclass(frozen=True)
class UniteGroups(Kernel[CapturedStep, CapturedStep]):
    """Makes sharding groups disjoint, and numbers them from 0 in the order in which the step has their members.

    If one member of a group has a sharding, all get it, and so do the slots of variables. If members have different
    ones, each gets an open constraint, and the results of these constraints are the group. Source: the import of
    sharding groups in Shardy.

        0: x, y    1: x    2: y, z    becomes    0: x, y, z
    """

    name: ClassVar[str] = "unite-groups"
    after: ClassVar[Mapping[str, str]] = {
        "apply-constraints": "members take the shardings of their constraints",
    }

    def apply(self, step: CapturedStep, context: Context) -> CapturedStep:
        annotations = annotated(step)
        if annotations is None or not annotations.groups:
            return step
        groups = _united(step, _known(step, annotations.groups.values()))
        for group in groups:
            _require_alike(step, annotations, group)
        uniting = _Uniting(step, annotations)
        return uniting.to_step({number: uniting.unite(group) for number, group in enumerate(groups)})


def _known(step: CapturedStep, groups: Iterable[ShardingGroup]) -> Iterator[ShardingGroup]:
    """Yields the groups with the members that the step has."""
    for group in groups:
        members = []
        for name in group.members:
            if name in step.by_name:
                members.append(name)
            elif node_of(name) in step.graph_index.nodes:
                members.append(tensor(name))
            else:
                log.warning("the step has no %s, a member of a sharding group (%s)", name, _places(group))
        if members:
            yield replace(group, members=tuple(members))


def _united(step: CapturedStep, groups: Iterable[ShardingGroup]) -> list[ShardingGroup]:
    """Returns disjoint groups; they and their members are in the order of the step."""
    position = {name: k for k, name in enumerate(step.graph_index.nodes)}

    def at(member: str) -> int:
        return position[step.by_name[member].handle if member in step.by_name else node_of(member)]

    found: list[ShardingGroup] = []
    for group in groups:
        same = [one for one in found if not set(one.members).isdisjoint(group.members)]
        members = {name for one in (*same, group) for name in one.members}
        origins = dict.fromkeys(origin for one in (*same, group) for origin in one.origins)
        found = [one for one in found if one not in same]
        found.append(ShardingGroup(tuple(sorted(members, key=at)), tuple(origins)))
    return sorted(found, key=lambda one: at(one.members[0]))


def _require_alike(step: CapturedStep, annotations: Annotations, group: ShardingGroup) -> None:
    """Passes if the members of a group have one shape and belong to the same manual region.

    Raises:
        StrategyError: two members differ.
    """
    region_of = {node: name for name, region in annotations.regions.items() for node in region.body}
    first, *others = group.members
    for other in others:
        places = f"the sharding group of {first} and {other} ({_places(group)})"
        shapes = [_spec(step, name).shape for name in (first, other)]
        if not shapes[0].is_compatible_with(shapes[1]) or shapes[0].rank != shapes[1].rank:
            raise StrategyError(f"In {places}, the shapes are {shapes[0]} and {shapes[1]}. Group tensors of one shape.")
        regions = [region_of.get(node_of(name)) for name in (first, other)]
        if regions[0] != regions[1]:
            named = [f"in the manual region {name}" if name else "outside of manual regions" for name in regions]
            raise StrategyError(
                f"In {places}, {first} is {named[0]}, but {other} is {named[1]}. Group tensors of one region."
            )


def _open_like(one: Constraint) -> Sharding:
    return Sharding.open(one.sharding.rank, one.sharding.mesh)


def _places(group: ShardingGroup) -> str:
    return listed(map(str, group.origins))


def _spec(step: CapturedStep, member: str) -> tf.TensorSpec:
    if member in step.by_name:
        return tf.TensorSpec(step.by_name[member].shape, step.by_name[member].dtype)
    return step.spec_of(tensor(member))


class _Uniting:
    """Shardings and constraints that the groups of one step need."""

    def __init__(self, step: CapturedStep, annotations: Annotations) -> None:
        self._step, self._annotations = step, annotations
        self._editor = StepEditor(step)
        self._edge_of = {name: k for k, edge in enumerate(annotations.edges) for name in edge.targets}
        self._edges = list(annotations.edges)
        self._variables = dict(annotations.variables)
        self._tensors = dict(annotations.tensors)
        self._constraints = dict(annotations.constraints)

    def unite(self, group: ShardingGroup) -> ShardingGroup:
        """Shards the members of a group alike; returns the group."""
        found = {name: self._requested(name) for name in group.members}
        requested = {name: one for name, one in found.items() if one and one.sharding != _open_like(one)}
        different = {one.sharding.axes: one for one in reversed(requested.values())}
        if len(different) > 1:
            return self._behind_constraints(group, requested)
        for one in different.values():
            for name in group.members:
                if name not in requested:
                    self._give(name, one)
        return group

    def _requested(self, member: str) -> Constraint | None:
        if member in self._step.by_name:
            return self._variables.get(member)
        edge = self._edges[self._edge_of[member]].constraint if member in self._edge_of else None
        return sharding_of(self._annotations, member) or edge

    def _give(self, member: str, one: Constraint) -> None:
        """Gives a member without a sharding that of its group."""
        if member in self._step.by_name:
            self._variables[member] = one
            slots = find_slots(self._step).get(member, ()) if self._step.gradients else ()
            shape = self._step.by_name[member].shape
            owners = {member, *(slot.name for slot in slots if slot.shape == shape)}
            for k, edge in enumerate(self._edges):
                if edge.owner in owners and edge.constraint is None:
                    self._edges[k] = replace(edge, constraint=one)
        elif member in self._edge_of:
            k = self._edge_of[member]
            self._edges[k] = replace(self._edges[k], constraint=opened(one))
        elif node_of(member) not in self._constraints:
            self._tensors[member] = one

    def _behind_constraints(self, group: ShardingGroup, requested: Mapping[str, Constraint]) -> ShardingGroup:
        """Adds an open constraint behind each member; returns the group of their results."""
        first, second, *_ = {one.sharding.axes: (name, one) for name, one in requested.items()}.values()
        shown = (f"{name} has {one.sharding} ({one.origin})" for name, one in (first, second))
        log.warning(
            "the members of a sharding group (%s) have different shardings, %s: only tensors computed from them are "
            "sharded alike", _places(group), " and ".join(shown),
        )  # fmt: skip
        mesh = first[1].sharding.mesh
        members = []
        for member in group.members:
            for name in self._tensors_of(member):
                sharding = Sharding.open(_spec(self._step, name).shape.rank, mesh)
                members.append(self._constrain(name, Constraint(sharding, group.origins[0])))
        return replace(group, members=tuple(members))

    def _tensors_of(self, member: str) -> list[str]:
        """Returns a tensor, or the reads of a variable outside of functions."""
        if member not in self._step.by_name:
            return [member]
        reads = (name for edge in self._edges if edge.owner == member for name in edge.targets)
        return [name for name in reads if "@" not in name]

    def _constrain(self, name: str, one: Constraint) -> str:
        """Adds a constraint between a tensor and its readers; returns its result."""
        node = f"autodist/unite_groups/{name.replace(':', '_')}"
        put_identity(self._editor, name, node)
        self._constraints[node] = one
        return tensor(node)

    def to_step(self, groups: Mapping[int, ShardingGroup]) -> CapturedStep:
        """Returns the step with its groups."""
        made = replace(
            self._annotations,
            groups=groups,
            variables=self._variables,
            tensors=self._tensors,
            edges=tuple(self._edges),
            constraints=self._constraints,
        )
        if len(self._constraints) > len(self._annotations.constraints):
            return self._editor.to_step(annotations=made)
        return self._step if made == self._annotations else replace(self._step, annotations=made)
