"""Checks that a strategy has one complete node for each variable, and a valid owner for each shard."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from autodist.errors import Place, StrategyError
from autodist.logs.formatting import did_you_mean, listed
from autodist.options.fields import OptionError
from autodist.proto import strategy_pb2
from autodist.resources import ResourceSpec
from autodist.strategies.partition import require_partitioning
from autodist.strategies.ps import known_workers
from autodist.strategies.variables import GraphLike, SyncedVariable, synced_variables
from autodist.synchronizers import has_synchronizer, partitioning_of, synchronizers_of

PlaceOf = Callable[[str, str], Place | None]
"""Returns the position of a variable's option in a file."""


def no_place(variable: str, option: str) -> None:
    """Returns None, for a strategy that does not come from a file."""


def check_nodes(
    strategy: strategy_pb2.Strategy,
    graph_item: GraphLike,
    resource_spec: ResourceSpec,
    place_of: PlaceOf = no_place,
) -> None:
    """Checks that a strategy has one complete node for each variable that has a gradient.

    Args:
        strategy: the output of a builder.
        graph_item: the captured step.
        resource_spec: the machines.
        place_of: returns the position of an option in a file, for messages.

    Raises:
        StrategyError: the strategy is not valid; the message has the variable, the reason and the fix.
    """
    synced = {variable.name: variable for variable in synced_variables(graph_item)}
    _check_names(strategy, [variable.name for variable in graph_item.variables], list(synced))
    for node in strategy.nodes:
        _check_partition(synced[node.variable], node, place_of)
        _check_synchronizers(node.variable, node, resource_spec, place_of)


def _check_names(strategy: strategy_pb2.Strategy, known: list[str], synced: list[str]) -> None:
    counts = Counter(node.variable for node in strategy.nodes)
    every, trained = frozenset(known), frozenset(synced)
    for name, count in counts.items():
        if name not in every:
            raise StrategyError(
                f"{strategy.builder} has a node for {name!r}, but the captured step has no such variable."
                f"{did_you_mean(name, known)} Variables with gradients are {listed(synced)}."
            )
        if name not in trained:
            raise StrategyError(f"{strategy.builder} has a node for {name}, which has no gradient; leave it out.")
        if count > 1:
            raise StrategyError(f"{strategy.builder} has {count} nodes for {name}; keep one of them.")
    for name in synced:
        if name not in counts:
            raise StrategyError(
                f"{strategy.builder} has no node for {name}, which has a gradient: its copies would diverge. "
                "Add a node with AllReduce or PS."
            )


def _check_partition(variable: SyncedVariable, node: strategy_pb2.VariableNode, place_of: PlaceOf) -> None:
    partitioning = partitioning_of(node)
    place = place_of(variable.name, "partition")
    if partitioning is None:
        if node.shards:
            raise StrategyError(
                f"{variable.name} has {len(node.shards)} shards but no partition with their sizes; add it.",
                place,
            )
        return
    try:
        require_partitioning(variable, partitioning)
    except StrategyError as error:
        raise StrategyError(error.problem, place) from None
    if len(node.shards) != len(partitioning.sizes):
        raise StrategyError(
            f"{variable.name} is cut in {len(partitioning.sizes)} pieces but has synchronizers for {len(node.shards)} "
            "shards; add one for each piece.",
            place,
        )
    if has_synchronizer(node):
        raise StrategyError(
            f"{variable.name} is partitioned and has a synchronizer of its own that no shard would use; leave it out.",
            place,
        )


def _check_synchronizers(
    variable: str, node: strategy_pb2.VariableNode, resource_spec: ResourceSpec, place_of: PlaceOf
) -> None:
    try:
        owners = [synchronizer.owner for synchronizer in synchronizers_of(node)]
    except OptionError as error:
        raise StrategyError(f"{variable} {error.problem}", place_of(variable, error.option)) from None
    except StrategyError as error:
        raise StrategyError(f"{variable} {error.problem}") from None
    for owner in owners:
        if owner is not None and not 0 <= owner < len(resource_spec.workers):
            raise StrategyError(
                f"{variable} is to be owned by worker {owner}, but there is no such worker; "
                f"the workers are {known_workers(resource_spec)}.",
                place_of(variable, "owner"),
            )
