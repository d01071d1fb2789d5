"""Resolves AUTO, and chooses the subgroups of hierarchical all-reduce."""

from __future__ import annotations

from dataclasses import replace

from autodist.proto import strategy_pb2
from autodist.resources import ResourceSpec
from autodist.strategies.nodes import distinct_shards
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
    """Returns a copy of the strategy without AUTO, and with subgroups if a node uses HIERARCHICAL.

    If all other variables use the same collective, RING or NCCL, AUTO becomes that one, since collectives do not mix
    with other algorithms. Otherwise it becomes HIERARCHICAL if subgroups pay off (`choose_subgroups`); other sums of
    the step, losses and state, then use the subgroups, too. Otherwise it becomes SHUFFLE. These two mix with all.
    HIERARCHICAL becomes SHUFFLE if there are too few workers for subgroups.

    Args:
        strategy: one that `check_strategy` accepts.
        graph_item: the captured step that it is for.
        resource_spec: the machines.
    """
    resolved = strategy_pb2.Strategy()
    resolved.CopyFrom(strategy)
    subgroups = _subgroups(strategy, graph_item, resource_spec)
    if subgroups:
        resolved.graph_config.subgroups[:] = subgroups
    spec = effective_spec(resolved)
    for node in resolved.nodes:
        _resolve(node, spec)
    return resolved


def _subgroups(strategy: strategy_pb2.Strategy, graph_item: GraphLike, resource_spec: ResourceSpec) -> tuple[int, ...]:
    if strategy.HasField("pipeline"):  # its sums are computed by the workers of a stage
        return ()
    ways = {synchronizer.way for _, synchronizer in all_synchronizers(strategy)}
    is_required = HIERARCHICAL in ways
    if effective_spec(strategy) in COLLECTIVES or (SHUFFLE in ways and AUTO not in ways and not is_required):
        return ()
    return choose_subgroups(resource_spec, summed_bytes(strategy, graph_item), is_required)


def summed_bytes(strategy: strategy_pb2.Strategy, graph_item: GraphLike) -> int:
    """Returns the bytes of dense gradients that a step sums over all workers, after compression."""
    variables = {variable.name: variable for variable in synced_variables(graph_item)}
    return sum(
        synchronizer.dense_bytes(piece) * count
        for node in strategy.nodes
        for piece, synchronizer, count in distinct_shards(variables[node.variable], node)
        if isinstance(synchronizer, AllReduce) and not piece.is_sparse
    )


def resolve_node(node: strategy_pb2.VariableNode, spec: str) -> strategy_pb2.VariableNode:
    """Returns a copy with `spec` in place of AUTO."""
    resolved = strategy_pb2.VariableNode()
    resolved.CopyFrom(node)
    _resolve(resolved, spec)
    return resolved


def _resolve(node: strategy_pb2.VariableNode, spec: str) -> None:
    for part in parts_of(node):
        synchronizer = synchronizer_of(part)
        resolved = resolve_spec(synchronizer, spec)
        if resolved is not synchronizer:
            set_synchronizer(part, resolved)


def resolve_spec(synchronizer: Synchronizer, spec: str) -> Synchronizer:
    """Returns the synchronizer with `spec` in place of AUTO, and SHUFFLE in place of HIERARCHICAL without subgroups."""
    is_open = synchronizer.way == AUTO or (synchronizer.way == HIERARCHICAL and spec == SHUFFLE)
    return replace(synchronizer, spec=spec) if is_open and isinstance(synchronizer, AllReduce) else synchronizer


def effective_spec(strategy: strategy_pb2.Strategy) -> str:
    """Returns the algorithm that AUTO stands for in this strategy."""
    ways = {synchronizer.way for _, synchronizer in all_synchronizers(strategy)} - {AUTO}
    if len(ways) == 1 and ways <= set(COLLECTIVES):
        return next(iter(ways))
    return HIERARCHICAL if strategy.graph_config.subgroups else SHUFFLE
