"""Whether a strategy can be carried out on this step and these machines, told before any process starts."""

from __future__ import annotations

from autodist.errors import StrategyError
from autodist.logs.suggestions import listed
from autodist.proto import strategy_pb2
from autodist.resources import ResourceSpec
from autodist.strategies.base import graph_config
from autodist.strategies.check_collectives import check_collectives
from autodist.strategies.check_nodes import PlaceOf, check_nodes, no_place
from autodist.strategies.check_pipeline import check_pipeline
from autodist.strategies.variables import GraphLike, synced_variables
from autodist.synchronizers import synchronizers_of


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
