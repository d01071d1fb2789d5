"""What AUTO stands for, and the teams of sums that teams make first."""

from __future__ import annotations

from dataclasses import replace

from autodist.proto import strategy_pb2
from autodist.resources import ResourceSpec
from autodist.strategies.nodes import alike_pieces
from autodist.strategies.subgroups import choose_subgroups
from autodist.strategies.variables import GraphLike, synced_variables
from autodist.synchronizers import (
    COLLECTIVES,
    HIERARCHICAL,
    AllReduce,
    Synchronizer,
    all_synchronizers,
    parts_of,
    set_synchronizer,
    synchronizer_of,
)

AUTO, SHUFFLE = "AUTO", "SHUFFLE"


def resolve_specs(
    strategy: strategy_pb2.Strategy, graph_item: GraphLike, resource_spec: ResourceSpec
) -> strategy_pb2.Strategy:
    """A copy in which no node says AUTO, and that has teams where a node says HIERARCHICAL.

    Where every other variable is reduced by the same collective, RING or NCCL, AUTO follows that one, since collectives
    stand only by themselves. Else it is HIERARCHICAL if teams pay (`choose_subgroups`), and what a step adds up
    besides, losses and state, goes by teams, too; or SHUFFLE. Both mix with all. HIERARCHICAL is SHUFFLE if there
    are too few workers for teams.

    Args:
        strategy: one that `check_strategy` passes.
        graph_item: the captured step that it is for.
        resource_spec: the machines.
    """
    resolved = strategy_pb2.Strategy()
    resolved.CopyFrom(strategy)
    teams = _teams(strategy, graph_item, resource_spec)
    if teams:
        resolved.graph_config.teams[:] = teams
    spec = effective_spec(resolved)
    for node in resolved.nodes:
        _resolve(node, spec)
    return resolved


def _teams(strategy: strategy_pb2.Strategy, graph_item: GraphLike, resource_spec: ResourceSpec) -> tuple[int, ...]:
    if strategy.HasField("pipeline"):  # whose sums are made by the workers of a stage
        return ()
    ways = {synchronizer.way for _, synchronizer in all_synchronizers(strategy)}
    is_asked = HIERARCHICAL in ways
    if effective_spec(strategy) in COLLECTIVES or (SHUFFLE in ways and AUTO not in ways and not is_asked):
        return ()
    return choose_subgroups(resource_spec, summed_bytes(strategy, graph_item), is_asked)


def summed_bytes(strategy: strategy_pb2.Strategy, graph_item: GraphLike) -> int:
    """Of what a step adds up over all workers for dense gradients, as it travels."""
    variables = {variable.name: variable for variable in synced_variables(graph_item)}
    return sum(
        said.dense_bytes(piece) * count
        for node in strategy.nodes
        for piece, said, count in alike_pieces(variables[node.variable], node)
        if isinstance(said, AllReduce) and not piece.is_sparse
    )


def resolve_node(node: strategy_pb2.VariableNode, spec: str) -> strategy_pb2.VariableNode:
    """A copy that says `spec` where it said AUTO."""
    resolved = strategy_pb2.VariableNode()
    resolved.CopyFrom(node)
    _resolve(resolved, spec)
    return resolved


def _resolve(node: strategy_pb2.VariableNode, spec: str) -> None:
    for part in parts_of(node):
        said = synchronizer_of(part)
        found = resolve_spec(said, spec)
        if found is not said:
            set_synchronizer(part, found)


def resolve_spec(synchronizer: Synchronizer, spec: str) -> Synchronizer:
    """The same, with `spec` in place of AUTO, and SHUFFLE in place of HIERARCHICAL where there are no teams."""
    is_open = synchronizer.way == AUTO or (synchronizer.way == HIERARCHICAL and spec == SHUFFLE)
    return replace(synchronizer, spec=spec) if is_open and isinstance(synchronizer, AllReduce) else synchronizer


def effective_spec(strategy: strategy_pb2.Strategy) -> str:
    """What AUTO stands for in this strategy."""
    ways = {synchronizer.way for _, synchronizer in all_synchronizers(strategy)} - {AUTO}
    if len(ways) == 1 and ways <= set(COLLECTIVES):
        return next(iter(ways))
    return HIERARCHICAL if strategy.graph_config.teams else SHUFFLE
