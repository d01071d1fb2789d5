"""Whether a strategy can be carried out on this step and these machines, told before any process starts."""

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
from autodist.synchronizers import COLLECTIVES, AllReduce, all_synchronizers, synchronizers_of


def check_strategy(
    strategy: strategy_pb2.Strategy,
    graph_item: GraphLike,
    resource_spec: ResourceSpec,
    place_of: PlaceOf = no_place,
) -> None:
    """Passes what the kernels can carry out.

    Args:
        strategy: what a builder wrote.
        graph_item: the captured step.
        resource_spec: the machines.
        place_of: where a variable's option stands in a file, for messages.

    Raises:
        StrategyError: names the variable, the reason and the mend.
    """
    check_nodes(strategy, graph_item, resource_spec, place_of)
    variables = {variable.name: variable for variable in synced_variables(graph_item)}
    for node in strategy.nodes:
        for synchronizer in synchronizers_of(node):
            problem = synchronizer.misfit(variables[node.variable])
            if problem is not None:
                raise StrategyError(problem, place_of(node.variable, "compressor"))
    _check_replicas(strategy, resource_spec)
    check_pipeline(strategy, variables, place_of)
    check_collectives(strategy, resource_spec, place_of)


def _check_replicas(strategy: strategy_pb2.Strategy, resource_spec: ResourceSpec) -> None:
    if strategy.pipeline.stages:
        resource_spec = resource_spec.with_micro_batches(len(strategy.graph_config.replicas))
    wanted = graph_config(resource_spec)
    if strategy.graph_config != wanted:
        raise StrategyError(
            f"{strategy.builder} runs on {_machines(strategy.graph_config)}, and the resource spec "
            f"has {_machines(wanted)}; let the builder take graph_config(resource_spec)."
        )


def _machines(config: strategy_pb2.GraphConfig) -> str:
    replicas = listed(f"worker {replica.worker} {replica.device}" for replica in config.replicas)
    return f"the replicas {replicas}" + (f" of {config.workers} workers" if config.workers else "")


def check_collectives(strategy: strategy_pb2.Strategy, resource_spec: ResourceSpec, place_of: PlaceOf) -> None:
    """Passes a strategy in which no variable is reduced by a collective, or all are, in a way that can be carried out.

    Raises:
        StrategyError: names the variable, the reason and the mend.
    """
    spec = effective_spec(strategy)
    ways = [(name, resolve_spec(said, spec)) for name, said in all_synchronizers(strategy)]
    known = {its.way for _, its in ways}
    # Looked for once a way, and not once a variable: of these, as of workers, there may be thousands.
    others = {way: next(((name, its.way) for name, its in ways if its.way != way), None) for way in known}
    lacking = {way: _lacking(way, resource_spec) for way in known & {*COLLECTIVES}}
    for variable, synchronizer in ways:
        if not isinstance(synchronizer, AllReduce) or synchronizer.spec not in COLLECTIVES:
            continue
        place, way = place_of(variable, "all_reduce_spec"), synchronizer.way
        other = others[way]
        if other is not None:
            raise StrategyError(_beside(variable, way, *other), place)
        if synchronizer.compressor != NO_COMPRESSOR:
            raise StrategyError(
                f"{variable} is reduced by {way} and has the compressor {synchronizer.compressor.text}: "
                "only SHUFFLE carries compressors out. Take all_reduce_spec SHUFFLE for all variables, or leave the "
                "compressor out.",
                place,
            )
        problem = lacking[way]
        if problem is not None:
            raise StrategyError(f"{variable} is reduced by {problem}", place)


def _beside(variable: str, way: str, other: str, others_way: str) -> str:
    """Collectives need step ids that agree on all workers, and hang beside what crosses workers by queues or
    accumulators in the same session."""
    return (
        f"{variable} is reduced by {way} and {other} by {others_way}: TensorFlow's collectives hang in one session "
        f"with any other way between workers. Take all_reduce_spec SHUFFLE in place of {way}, which mixes with "
        f"everything, or {way} for every variable."
    )


def _lacking(way: str, resource_spec: ResourceSpec) -> str | None:
    """What of the machines a collective lacks, after "is reduced by"; None if nothing."""
    servers = [worker for worker in resource_spec.workers if not worker.has_replicas]
    if servers:
        return (
            f"{way}, in which every worker takes part, and {servers[0].name} has no replica; "
            "take all_reduce_spec SHUFFLE."
        )
    others = [replica for replica in resource_spec.replicas if not replica.device.startswith("gpu:")]
    if way == "NCCL" and others:
        return (
            f"NCCL, which needs a GPU for every replica, and {others[0].worker.name} has "
            f"one on {others[0].device}; take all_reduce_spec SHUFFLE, or give it a GPU."
        )
    return None
