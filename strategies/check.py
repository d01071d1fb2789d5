"""Validates a strategy for a captured step and the given machines, before any process starts."""

from __future__ import annotations

from autodist.compressors import NO_COMPRESSOR
from autodist.errors import StrategyError
from autodist.logs.formatting import listed
from autodist.proto import strategy_pb2
from autodist.resources import ResourceSpec
from autodist.strategies.base import graph_config
from autodist.strategies.check_nodes import PlaceOf, check_nodes, no_place
from autodist.strategies.check_pipeline import check_pipeline
from autodist.strategies.specs import effective_spec, resolve_spec
from autodist.strategies.variables import GraphLike, synced_variables
from autodist.synchronizers import COLLECTIVES, AllReduce, ParameterServer, all_synchronizers, synchronizers_of


def check_strategy(
    strategy: strategy_pb2.Strategy,
    graph_item: GraphLike,
    resource_spec: ResourceSpec,
    place_of: PlaceOf = no_place,
) -> None:
    """Checks that the kernels support a strategy.

    Args:
        strategy: the output of a builder.
        graph_item: the captured step.
        resource_spec: the machines.
        place_of: returns the position of a variable's option in a file, for messages.

    Raises:
        StrategyError: names the variable, the reason and the fix.
    """
    check_nodes(strategy, graph_item, resource_spec, place_of)
    variables = {variable.name: variable for variable in synced_variables(graph_item)}
    for node in strategy.nodes:
        for synchronizer in synchronizers_of(node):
            problem = synchronizer.misfit(variables[node.variable])
            if problem is not None:
                raise StrategyError(problem, place_of(node.variable, synchronizer.compressor_option))
    _check_replicas(strategy, resource_spec)
    _check_local_steps(strategy, place_of)
    check_pipeline(strategy, variables, place_of)
    check_collectives(strategy, resource_spec, place_of)


def _check_replicas(strategy: strategy_pb2.Strategy, resource_spec: ResourceSpec) -> None:
    if strategy.pipeline.stages:
        resource_spec = resource_spec.with_micro_batches(len(strategy.graph_config.replicas))
    wanted = graph_config(resource_spec)
    if strategy.graph_config != wanted:
        raise StrategyError(
            f"{strategy.builder} runs on {_machines(strategy.graph_config)}, but the resource spec "
            f"has {_machines(wanted)}; use graph_config(resource_spec) in the builder."
        )


def _check_local_steps(strategy: strategy_pb2.Strategy, place_of: PlaceOf) -> None:
    """Checks that variables with local steps go together with the rest of a strategy.

    Raises:
        StrategyError: names the variable, the reason and the fix.
    """
    local = [(name, one) for name, one in all_synchronizers(strategy) if isinstance(one, AllReduce) and one.local]
    if not local:
        return
    name, first = local[0]
    place = place_of(name, "local_steps")
    if strategy.pipeline.stages or strategy.HasField("mesh"):
        raise StrategyError(
            f"{name} makes local steps, and {strategy.builder} divides the model between workers, which take part in "
            "each step together. Remove local_steps, or use DiLoCo, where each worker computes the whole model.",
            place,
        )
    collective = next(((n, one.spec) for n, one in local if one.spec in COLLECTIVES), None)
    if collective is not None:
        raise StrategyError(
            f"{collective[0]} makes local steps, and the outer step does not use {collective[1]}: TensorFlow's "
            "collectives need all workers in each step. Use all_reduce_spec SHUFFLE.",
            place_of(collective[0], "all_reduce_spec"),
        )
    servers = ((n, one) for n, one in all_synchronizers(strategy) if isinstance(one, ParameterServer))
    ahead = next((n for n, one in servers if one.synchrony.runs_ahead), None)
    if ahead is not None:
        raise StrategyError(
            f"{name} makes local steps ({first.text}), and {ahead} has sync: false or a staleness: an outer step would "
            "average values of different steps. Set sync: true and staleness: 0 for it, or give it local steps, too.",
            place,
        )


def _machines(config: strategy_pb2.GraphConfig) -> str:
    replicas = listed(f"worker {replica.worker} {replica.device}" for replica in config.replicas)
    return f"the replicas {replicas}" + (f" of {config.workers} workers" if config.workers else "")


def check_collectives(strategy: strategy_pb2.Strategy, resource_spec: ResourceSpec, place_of: PlaceOf) -> None:
    """Checks that either no variable or every variable uses the same collective, and that the machines support it.

    Raises:
        StrategyError: names the variable, the reason and the fix.
    """
    spec = effective_spec(strategy)
    ways = [(name, resolve_spec(one, spec)) for name, one in all_synchronizers(strategy)]
    known = {its.way for _, its in ways}
    # Computed per algorithm rather than per variable: there may be thousands of variables and workers.
    others = {way: next(((name, its.way) for name, its in ways if its.way != way), None) for way in known}
    lacking = {way: _lacking(way, resource_spec) for way in known & {*COLLECTIVES}}
    for variable, synchronizer in ways:
        if not isinstance(synchronizer, AllReduce) or synchronizer.spec not in COLLECTIVES:
            continue
        place, way = place_of(variable, "all_reduce_spec"), synchronizer.way
        if strategy.HasField("mesh"):
            raise StrategyError(
                f"{variable} is reduced by {way}, and {strategy.builder} divides tensors over a mesh, whose places "
                "exchange parts of tensors: TensorFlow's collectives hang in one session with any other communication "
                "between workers. Use all_reduce_spec SHUFFLE, which sums the gradients of each row along the axis "
                "of the batch.",
                place,
            )
        other = others[way]
        if other is not None:
            raise StrategyError(_mixed(variable, way, *other), place)
        if synchronizer.compressor != NO_COMPRESSOR:
            raise StrategyError(
                f"{variable} is reduced by {way} and has the compressor {synchronizer.compressor.text}: "
                "only SHUFFLE and HIERARCHICAL support compressors. Use all_reduce_spec SHUFFLE for all variables, or "
                "leave the compressor out.",
                place,
            )
        problem = lacking[way]
        if problem is not None:
            raise StrategyError(f"{variable} is reduced by {problem}", place)


def _mixed(variable: str, way: str, other: str, others_way: str) -> str:
    """Collectives need step ids that agree on all workers. They deadlock if queues or accumulators also transfer data
    between workers in the same session."""
    return (
        f"{variable} is reduced by {way} and {other} by {others_way}: TensorFlow's collectives hang in one session "
        f"with any other communication between workers. Use all_reduce_spec SHUFFLE instead of {way}, which mixes "
        f"with everything, or {way} for every variable."
    )


def _lacking(way: str, resource_spec: ResourceSpec) -> str | None:
    """Returns the requirement of a collective that the machines lack, to follow "is reduced by"; None if met."""
    servers = [worker for worker in resource_spec.workers if not worker.has_replicas]
    if servers:
        return (
            f"{way}, in which every worker takes part, but {servers[0].name} has no replica; "
            "use all_reduce_spec SHUFFLE."
        )
    others = [replica for replica in resource_spec.replicas if not replica.device.startswith("gpu:")]
    if way == "NCCL" and others:
        return (
            f"NCCL, which needs a GPU for every replica, but {others[0].worker.name} has "
            f"one on {others[0].device}; use all_reduce_spec SHUFFLE, or a GPU for it."
        )
    if resource_spec.encrypt:
        return (
            f"{way}, and `encrypt: {resource_spec.encrypt}` carries only what goes from server to server: TensorFlow's "
            "collectives choose their connections themselves. Use all_reduce_spec SHUFFLE, or remove `encrypt`."
        )
    return None
