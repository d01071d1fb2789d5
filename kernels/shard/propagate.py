"""Propagation: the shardings of all tensors of a step, from those that are requested."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from math import prod

import tensorflow as tf

from autodist.graph.names import tensor
from autodist.graph.node_rules import NodeRule, Rules, Side
from autodist.graph.ops import Factor, FactorRule, Trait, having
from autodist.graph.step import CapturedStep
from autodist.sharding import Mesh, Sharding

_PASSES_THROUGH = having(
    Trait.ELEMENTWISE | Trait.IDENTITY | Trait.RESHAPES | Trait.CASTS | Trait.READ | Trait.ASSIGNMENT
) | {"Transpose"}
"""Ops whose operands and result are best divided alike."""

_LEVELS = 3
"""Pass-through ops; then factors of all ops that are not reduced; then all factors."""

Axes = tuple[str, ...]


@dataclass(frozen=True)
class Member:
    """A dimension that belongs to a factor of a node."""

    side: Side
    dimension: int


class Shardings:
    """The sharding of each tensor and variable of a step, by key (`Side.key`).

    Shardings only grow. Propagation follows factor rules in both directions. It considers requested shardings of
    lower priority numbers first. For each, it lets shardings pass through elementwise ops and moves of axes, then along
    factors that are not reduced, then along all factors. If two factors of a node want one axis, the one of the larger
    tensor gets it. If members of a factor differ, they get the axes on which they agree.

    Source: the sharding propagation of Shardy (OpenXLA), which follows GSPMD (Xu et al., 2021).

    Args:
        step: the step; its annotations are in normal form.
        mesh: the mesh, with the axes along which tensors may be divided.
        rules: of its nodes.
    """

    def __init__(self, step: CapturedStep, mesh: Mesh, rules: Rules) -> None:
        self._step, self._mesh, self._rules = step, mesh, rules
        self._found: dict[str, Sharding] = {}
        self._barriers = frozenset() if step.annotations is None else step.annotations.barriers
        self._rule_of = {name: rules.of(name) for name in step.graph_index.nodes} | dict(self._groups())
        self._touching: dict[str, list[str]] = defaultdict(list)
        for name, rule in self._rule_of.items():
            for side in rule.sides:
                self._touching[side.key].append(name)
        self.requested = {**dict(self._operands_of_collectives()), **dict(self._requested())}

    def of(self, key: str, rank: int) -> Sharding:
        """Returns the sharding of a tensor or variable."""
        return self._found.get(key) or Sharding.open(rank)

    def propagate(self) -> None:
        """Finds the shardings."""
        priorities = sorted({dim.priority or 0 for one in self.requested.values() for dim in one.dims})
        for priority in priorities:
            for key, sharding in self.requested.items():
                self._found[key] = _up_to(sharding, priority, self._found.get(key))
            for level in range(_LEVELS):
                self._until_stable(level)

    def _requested(self) -> Iterable[tuple[str, Sharding]]:
        annotations = self._step.annotations
        if annotations is None:
            return
        for name, constraint in annotations.variables.items():
            yield self._step.by_name[name].handle, constraint.sharding
        for node, constraint in annotations.constraints.items():
            yield tensor(node), constraint.sharding
        yield from ((tensor(name), constraint.sharding) for name, constraint in annotations.tensors.items())
        for region in annotations.regions.values():
            yield from ((tensor(node), constraint.sharding) for node, constraint in region.exact.items())

    def _operands_of_collectives(self) -> Iterable[tuple[str, Sharding]]:
        """Yields the shardings that collectives of manual regions request of their operands."""
        for region in self._step.annotations.regions.values() if self._step.annotations is not None else ():
            for node, one in region.collectives.items():
                if one.operand is not None:
                    yield tensor(self._step.graph_index.nodes[node].input[0]), one.operand

    def _groups(self) -> Iterable[tuple[str, NodeRule]]:
        """Yields a rule for each sharding group, whose members are divided alike."""
        annotations = self._step.annotations
        for number, group in ({} if annotations is None else annotations.groups).items():
            sides = [self._side(name) for name in group.members]
            node = tf.compat.v1.NodeDef(name=f"group {number}", op="Identity")
            axes = sides[0].factors
            yield node.name, NodeRule(node, tuple(sides), (), FactorRule((axes,) * len(sides), ()))

    def _side(self, name: str) -> Side:
        """Returns a variable or a tensor as a side of a group."""
        variable = self._step.by_name.get(name)
        lengths = self._rules.static.lengths(name) if variable is None else variable.shape
        assert lengths is not None, "members of a group have equal shapes"
        key = tensor(name) if variable is None else variable.handle
        return Side(key, lengths, tuple(k if n != 1 else None for k, n in enumerate(lengths)))

    def _until_stable(self, level: int) -> None:
        waiting = deque(self._rule_of)
        queued = set(waiting)
        while waiting:
            name = waiting.popleft()
            queued.discard(name)
            for key in self._visit(self._rule_of[name], level):
                for other in self._touching[key]:
                    if other not in queued:
                        queued.add(other)
                        waiting.append(other)

    def _visit(self, rule: NodeRule, level: int) -> set[str]:
        """Lets the factors of a node agree; returns the keys whose shardings have grown."""
        if (
            rule.rule is None
            or rule.node.name in self._barriers
            or (level == 0 and rule.node.op not in _PASSES_THROUGH)
            or not any(side.key in self._found for side in rule.sides)  # the nodes of most tensors: nothing to pass on
        ):
            return set()
        factors = members_of(rule)
        grown: set[str] = set()
        for factor in sorted(factors, key=lambda f: -max(self._elements(m.side) for m in factors[f])):
            if level == 1 and not _is_kept(rule, factor):
                continue
            axes = self._common(factors[factor])
            used = self._used_by_others(factors, factor)
            axes = unused(axes, used)
            for member in factors[factor]:
                if self._grow(member, axes):
                    grown.add(member.side.key)
        return grown

    def _common(self, members: Sequence[Member]) -> Axes:
        """Returns the longest axes of a member that all others' axes are prefixes of, else their common prefix."""
        found = sorted((self._axes(m) for m in members), key=len)
        longest = found[-1]
        if all(longest[: len(axes)] == axes for axes in found):
            return longest
        sharded = [axes for axes in found if axes]
        same = 0
        while all(len(axes) > same and axes[same] == sharded[0][same] for axes in sharded):
            same += 1
        return sharded[0][:same]

    def _used_by_others(self, factors: Mapping[Factor, Sequence[Member]], factor: Factor) -> set[str]:
        """Returns the axes of a node's other factors."""
        return {
            axis for other, members in factors.items() if other != factor for m in members for axis in self._axes(m)
        }

    def _axes(self, member: Member) -> Axes:
        return self.of(member.side.key, len(member.side.lengths)).dims[member.dimension].axes

    def _grow(self, member: Member, axes: Axes) -> bool:
        """Adds axes to a dimension, as far as it is open and divisible; returns True if its sharding has changed."""
        side, at = member.side, member.dimension
        sharding = self.of(side.key, len(side.lengths))
        dim, length = sharding.dims[at], side.lengths[at]
        others = {axis for k, other in enumerate(sharding.dims) if k != at for axis in other.axes}
        taken = {*others, *sharding.whole, *sharding.partial}
        axes = dividing(self._mesh, unused(axes, taken), [length])
        if not dim.is_open or len(axes) <= len(dim.axes) or axes[: len(dim.axes)] != dim.axes:
            return False
        self._found[side.key] = sharding.with_axes(at, axes)
        return True

    @staticmethod
    def _elements(side: Side) -> int:
        return prod(length for length in side.lengths if length is not None)


def members_of(rule: NodeRule) -> dict[Factor, list[Member]]:
    """Returns the dimensions of each factor of a node, operands first."""
    found: dict[Factor, list[Member]] = {}
    for side in rule.sides:
        for at, factor in enumerate(side.factors):
            if factor is not None:
                found.setdefault(factor, []).append(Member(side, at))
    return found


def divides(length: int | None, parts: int) -> bool:
    """Returns True if a length is known and is a multiple of a number of parts."""
    return length is not None and length % parts == 0


def unused(axes: Axes, used: Collection[str]) -> Axes:
    """Returns the axes before the first one that is used already."""
    return tuple(takewhile(lambda axis: axis not in used, axes))


def dividing(mesh: Mesh, axes: Iterable[str], lengths: Iterable[int | None]) -> Axes:
    """Returns the first of some axes, as many as together divide all lengths."""
    found, divided = tuple(axes), list(lengths)
    while found and not all(divides(length, mesh.count(found)) for length in divided):
        found = found[:-1]
    return found


def _is_kept(rule: NodeRule, factor: Factor) -> bool:
    """Returns True if a factor occurs in all operands with factors, and in all results."""
    operands = [side for side in rule.operands if side is not None and any(f is not None for f in side.factors)]
    return all(factor in side.factors for side in [*operands, *filter(None, rule.results)])


def _up_to(sharding: Sharding, priority: int, before: Sharding | None) -> Sharding:
    """Returns a requested sharding without the dimensions of later priorities, which keep what they have so far."""
    dims = tuple(
        dim if (dim.priority or 0) <= priority else replace(dim, axes=(), is_open=True) for dim in sharding.dims
    )
    if before is not None:
        dims = tuple(
            replace(dim, axes=old.axes) if len(old.axes) > len(dim.axes) and dim.is_open else dim
            for dim, old in zip(dims, before.dims, strict=True)
        )
    return replace(sharding, dims=dims)
