"""OverrideVariables: replaces a builder's choices for variables selected by patterns."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from autodist.errors import StrategyError
from autodist.logs.formatting import listed, nearest
from autodist.placement.partitioning import Partitioning
from autodist.proto import strategy_pb2
from autodist.resources import ResourceSpec
from autodist.strategies.base import BuildsStrategy, StrategyBuilder, make_strategy
from autodist.strategies.build_strategy import call_builder
from autodist.strategies.check_nodes import check_nodes
from autodist.strategies.loads import GreedyLoads, PieceKey
from autodist.strategies.nodes import node_of, pieces
from autodist.strategies.override import Override, UseAllReduce, UseParameterServer
from autodist.strategies.partitioning import shards_of
from autodist.strategies.ps import owner_index
from autodist.strategies.variables import GraphLike, SyncedVariable, synced_variables
from autodist.synchronizers import AllReduce, ParameterServer, partitioning_of, synchronizers_of

log = logging.getLogger("autodist.strategies")

_REPLACED = "; without the settings of variables, which replace the choice"


@dataclass(frozen=True)
class OverrideVariables(StrategyBuilder):
    """A builder's strategy with the nodes of some variables replaced.

    For the few variables that are known to need another choice. A variable uses the first override that matches it; a
    variable without a match keeps the builder's choice.

    Cost: the builder's, with that of each replaced variable (see AllReduce and PS).

    Attributes:
        builder: decides for all variables first.
        overrides: the overrides in order of precedence.
    """

    builder: BuildsStrategy
    overrides: tuple[Override, ...]

    def __post_init__(self) -> None:
        """Checks nothing: the parts check themselves."""

    def build(self, graph_item: GraphLike, resource_spec: ResourceSpec) -> strategy_pb2.Strategy:
        """Returns the strategy.

        Raises:
            StrategyError: an override matches no variable, or the builder divides tensors over a mesh.
        """
        inner = call_builder(self.builder, graph_item, resource_spec)
        check_nodes(inner, graph_item, resource_spec)
        if inner.HasField("mesh"):
            raise StrategyError(
                f"The overrides of {listed(repr(one.pattern) for one in self.overrides)} choose how variables "
                f"are synchronized, but {inner.builder} divides variables over a mesh, where all gradients are summed "
                "over the axis of the batch, without compressors and parameter servers. Remove the overrides, or use "
                "another builder.",
                next((override.place for override in self.overrides), None),
            )
        variables = synced_variables(graph_item)
        chosen = _chosen(self.overrides, variables, graph_item)
        nodes = {node.variable: node for node in inner.nodes}
        nodes |= replaced_nodes(chosen, nodes, variables, resource_spec)
        name = f"{inner.builder} with variables of their own"
        strategy = make_strategy(name, resource_spec, variables, nodes.values())
        strategy.prefetch = inner.prefetch
        if inner.HasField("choice"):
            strategy.choice.CopyFrom(inner.choice)
            strategy.choice.basis = strategy.choice.basis.removesuffix(_REPLACED) + _REPLACED
        if inner.HasField("pipeline"):
            strategy.graph_config.CopyFrom(inner.graph_config)
            strategy.pipeline.CopyFrom(inner.pipeline)
        strategy.recomputed_blocks.extend(inner.recomputed_blocks)
        return strategy


def _chosen(
    overrides: Sequence[Override], variables: Sequence[SyncedVariable], graph_item: GraphLike
) -> dict[str, Override]:
    """Returns the override that each variable uses, by name.

    Raises:
        StrategyError: an override matches no variable that has a gradient.
    """
    names = [variable.name for variable in variables]
    for override in overrides:
        if not any(override.matches(name) for name in names):
            raise StrategyError(_no_match(override, names, graph_item), override.place)
    chosen: dict[str, Override] = {}
    for name in names:
        first = next((override for override in overrides if override.matches(name)), None)
        if first is not None:
            chosen[name] = first
    for override in overrides:
        if not any(used is override for used in chosen.values()):
            log.warning(
                "%sThe pattern %r changes nothing: patterns before it match all of its variables.",
                f"{override.place}: " if override.place else "",
                override.pattern,
            )
    return chosen


def _no_match(override: Override, names: Sequence[str], graph_item: GraphLike) -> str:
    without = [variable.name for variable in graph_item.variables if override.matches(variable.name)]
    if without:
        return (
            f"The pattern {override.pattern!r} matches only variables that have no gradient in this step "
            f"({listed(without[:3])}), so there is nothing to synchronise; remove it."
        )
    return (
        f"The pattern {override.pattern!r} matches no variable (it must match the whole name). "
        f"The nearest variables are {listed(nearest(override.pattern, names))}."
    )


Nodes = Mapping[str, strategy_pb2.VariableNode]
"""By the variable's name."""

Kind = TypeVar("Kind")
Default = TypeVar("Default")


@dataclass(frozen=True)
class _Replacement:
    """The synchronizers that an override selects for a variable.

    Attributes:
        variable: the variable.
        partitioning: its partitioning; None if it is whole.
        synchronizers: one for each shard; the owners of parameter servers are only valid if `is_decided`.
        is_decided: True if the owners are final, or if there are none.
    """

    variable: SyncedVariable
    partitioning: Partitioning | None
    synchronizers: Sequence[AllReduce] | Sequence[ParameterServer]
    is_decided: bool = True

    def shards(self) -> Iterator[tuple[SyncedVariable, AllReduce | ParameterServer]]:
        """Yields each shard as a variable, with its synchronizer."""
        yield from zip(shards_of(self.variable, self.partitioning), self.synchronizers, strict=True)

    def node(self, assigned: Mapping[PieceKey, int]) -> strategy_pb2.VariableNode:
        """Returns the node, with assigned owners for undecided ones."""
        name = self.variable.name
        decided = [
            replace(one, owner=assigned.get((name, index), one.owner)) if isinstance(one, ParameterServer) else one
            for index, one in enumerate(self.synchronizers)
        ]
        return node_of(name, self.partitioning, decided)


def replaced_nodes(
    chosen: Mapping[str, Override], nodes: Nodes, variables: Sequence[SyncedVariable], resource_spec: ResourceSpec
) -> dict[str, strategy_pb2.VariableNode]:
    """Returns the nodes of the variables that use an override.

    Undecided owners are assigned last; the bytes of all decided ones count.

    Args:
        chosen: the override that each variable uses.
        nodes: the builder's.
        variables: all that have a gradient.
        resource_spec: the machines.

    Raises:
        StrategyError: a variable cannot be partitioned according to its override, or an owner is no worker.
    """
    groups = [one.group for node in nodes.values() for one in synchronizers_of(node) if one.group is not None]
    default = AllReduce(group=max(groups, default=-1) + 1)
    replaced = {
        variable.name: _replacement(chosen[variable.name], variable, nodes[variable.name], default, resource_spec)
        for variable in variables
        if variable.name in chosen
    }
    loads = GreedyLoads(resource_spec)
    for variable in variables:
        replacement = replaced.get(variable.name)
        if replacement is None or replacement.is_decided:
            shards = pieces(variable, nodes[variable.name]) if replacement is None else replacement.shards()
            for shard, synchronizer in shards:
                if synchronizer.owner is not None:
                    loads.add(synchronizer.owner, shard.byte_size)
    sizes = {
        (name, index): shard.byte_size
        for name, replacement in replaced.items() if not replacement.is_decided
        for index, (shard, _) in enumerate(replacement.shards())
    }  # fmt: skip
    owners = loads.place_pieces(sizes)
    return {name: one.node(owners) for name, one in replaced.items()}


def _replacement(
    override: Override,
    variable: SyncedVariable,
    before: strategy_pb2.VariableNode,
    default: AllReduce,
    resource_spec: ResourceSpec,
) -> _Replacement:
    use, partitioning = override.use, _partitioning(override, variable, before)
    count = 1 if partitioning is None else len(partitioning.sizes)
    if isinstance(use, UseAllReduce):
        reduced = [one for one in synchronizers_of(before) if isinstance(one, AllReduce)]
        try:
            return _Replacement(variable, partitioning, [use.applied(one) for one in _matched(count, reduced, default)])
        except StrategyError as error:
            raise StrategyError(error.problem, override.place) from None
    earlier = [one for one in synchronizers_of(before) if isinstance(one, ParameterServer)]
    servers = [use.applied(one, variable.is_sent_whole) for one in _matched(count, earlier, None)]
    owners = _owners(override, use, variable, count, resource_spec)
    if owners:
        servers = [replace(server, owner=owner) for server, owner in zip(servers, owners, strict=True)]
    keeps_owners = len(earlier) == count and partitioning == partitioning_of(before)
    return _Replacement(variable, partitioning, servers, bool(owners) or keeps_owners)


def _matched(count: int, earlier: Sequence[Kind], default: Default) -> Sequence[Kind | Default]:
    """Returns the earlier synchronizer of each shard: its own if their numbers agree, else the first one."""
    return earlier if len(earlier) == count else [earlier[0] if earlier else default] * count


def _owners(
    override: Override, use: UseParameterServer, variable: SyncedVariable, count: int, resource_spec: ResourceSpec
) -> list[int]:
    """Returns the owner of each shard according to the override; empty if it names none."""
    if use.owner is None:
        return []
    named = use.owner if isinstance(use.owner, tuple) else (use.owner,) * count
    if len(named) != count:
        problem = f"owner names {len(named)} workers for {variable.name}, which has {count} shards"
        if count == 1:
            problem = f"owner names {len(named)} workers for {variable.name}, which is whole"
        raise StrategyError(f"{problem}; name one, or one for each shard.", override.place)
    try:
        return [owner_index(owner, resource_spec) for owner in named]
    except StrategyError as error:
        raise StrategyError(error.problem, override.place) from None


def _partitioning(
    override: Override, variable: SyncedVariable, before: strategy_pb2.VariableNode
) -> Partitioning | None:
    partition = override.use.partition
    if partition is None:
        return partitioning_of(before)
    try:
        return partition.partitioning(variable)
    except StrategyError as error:
        raise StrategyError(error.problem, override.place) from None
