"""Whether a strategy has one complete node for each variable, and each piece a place where it can be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from autodist.errors import Place, StrategyError
from autodist.nearest import did_you_mean, listed
from autodist.proto import strategy_pb2
from autodist.resources import ResourceSpec
from autodist.strategies.nodes import Synchronized, cut_of, synchronized_parts
from autodist.strategies.partition import require_cut
from autodist.strategies.ps import known_workers
from autodist.strategies.variables import GraphLike, SyncedVariable, synced_variables

Spec = strategy_pb2.AllReduce.Spec

PlaceOf = Callable[[str, str], Place | None]
"""Where a variable's option stands in a file."""


def no_place(variable: str, option: str) -> None:
    """For a strategy that came from no file."""


def check_nodes(
    strategy: strategy_pb2.Strategy,
    graph_item: GraphLike,
    resource_spec: ResourceSpec,
    place_of: PlaceOf = no_place,
) -> None:
    """Passes a strategy with one complete node for each variable that has a gradient.

    Args:
        strategy: what a builder wrote.
        graph_item: the captured step.
        resource_spec: the machines.
        place_of: for messages.

    Raises:
        StrategyError: names the variable, the reason and the mend.
    """
    synced = {variable.name: variable for variable in synced_variables(graph_item)}
    _check_names(strategy, [variable.name for variable in graph_item.variables], list(synced))
    for node in strategy.nodes:
        _check_partition(synced[node.variable], node, place_of)
        for part in synchronized_parts(node):
            _check_synchronizer(node.variable, part, resource_spec, place_of)


def _check_names(strategy: strategy_pb2.Strategy, known: list[str], synced: list[str]) -> None:
    counts = Counter(node.variable for node in strategy.nodes)
    for name, count in counts.items():
        if name not in known:
            raise StrategyError(
                f"{strategy.builder} has a node for {name!r}, and the captured step has no such variable."
                f"{did_you_mean(name, known)} Variables with gradients are {listed(synced)}."
            )
        if name not in synced:
            raise StrategyError(f"{strategy.builder} has a node for {name}, which has no gradient; leave it out.")
        if count > 1:
            raise StrategyError(f"{strategy.builder} has {count} nodes for {name}; keep one of them.")
    for name in synced:
        if name not in counts:
            raise StrategyError(
                f"{strategy.builder} has no node for {name}, which has a gradient: its copies would drift apart. "
                "Add one that says AllReduce or PS."
            )


def _check_partition(variable: SyncedVariable, node: strategy_pb2.VariableNode, place_of: PlaceOf) -> None:
    cut = cut_of(node)
    place = place_of(variable.name, "partition")
    if cut is None:
        if node.shards:
            raise StrategyError(
                f"{variable.name} has {len(node.shards)} shards and no partition that says how long they are; add it.",
                place,
            )
        return
    try:
        require_cut(variable, cut)
    except StrategyError as error:
        raise StrategyError(error.problem, place) from None
    if len(node.shards) != len(cut.sizes):
        raise StrategyError(
            f"{variable.name} is cut in {len(cut.sizes)} pieces and has synchronizers for {len(node.shards)} shards; "
            "give each piece one.",
            place,
        )
    if node.WhichOneof("synchronizer") is not None:
        raise StrategyError(
            f"{variable.name} is partitioned and has a synchronizer of its own that no shard would use; leave it out.",
            place,
        )


def _check_synchronizer(variable: str, part: Synchronized, resource_spec: ResourceSpec, place_of: PlaceOf) -> None:
    if part.WhichOneof("synchronizer") is None:
        what = "node" if isinstance(part, strategy_pb2.VariableNode) else "shard"
        raise StrategyError(f"{variable} has a {what} without a synchronizer; set all_reduce or parameter_server.")
    if part.HasField("parameter_server"):
        _check_server(variable, part.parameter_server, resource_spec, place_of)
    elif part.all_reduce.spec not in Spec.values():
        raise StrategyError(
            f"{variable} is to be reduced by spec {part.all_reduce.spec}, which does not exist; "
            f"take one of {listed(Spec.keys())}.",
            place_of(variable, "all_reduce_spec"),
        )


def _check_server(
    variable: str, server: strategy_pb2.ParameterServer, resource_spec: ResourceSpec, place_of: PlaceOf
) -> None:
    if not 0 <= server.owner < len(resource_spec.workers):
        raise StrategyError(
            f"{variable} is to be owned by worker {server.owner}, and there is no such worker; "
            f"the workers are {known_workers(resource_spec)}.",
            place_of(variable, "owner"),
        )
    if server.staleness < 0:
        raise StrategyError(
            f"{variable} has staleness {server.staleness}, and a worker cannot be fewer than 0 steps ahead; "
            "take 0 or more.",
            place_of(variable, "staleness"),
        )
