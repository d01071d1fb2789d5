"""Whether what a pipeline says of variables fits its stages."""

from __future__ import annotations

from autodist.errors import StrategyError
from autodist.proto import strategy_pb2
from autodist.strategies.check_nodes import PlaceOf
from autodist.synchronizers import ParameterServer, cut_of, synchronizers_of


def stage_of(strategy: strategy_pb2.Strategy, node: strategy_pb2.VariableNode) -> int:
    """The pipeline stage that holds a variable, of a strategy that `check_pipeline` passes."""
    workers = [stage.worker for stage in strategy.pipeline.stages]
    return workers.index(node.parameter_server.owner)


def check_pipeline(strategy: strategy_pb2.Strategy, place_of: PlaceOf) -> None:
    """Passes a strategy without pipeline stages, or one in which each variable is held by the worker of one stage.

    Raises:
        StrategyError: names the variable, the reason and the mend.
    """
    stages = {stage.worker for stage in strategy.pipeline.stages}
    for node in strategy.nodes if stages else ():
        if cut_of(node) is not None:
            raise StrategyError(
                f"{node.variable} is partitioned, and a pipeline's stages hold whole variables. Leave the partition "
                "out.",
                place_of(node.variable, "partition"),
            )
        (said,) = synchronizers_of(node)
        if not isinstance(said, ParameterServer):
            raise StrategyError(
                f"{node.variable} is to be all-reduced, and in a pipeline each variable is held by its stage's worker "
                "alone. Take it out of `variables`, and say by the patterns of `stages` where it lies.",
                place_of(node.variable, "synchronizer"),
            )
        if said.asynchronous or said.staleness:
            raise StrategyError(
                f"{node.variable} is to be updated asynchronously (sync: false, or staleness), and a pipeline's "
                "workers make each step together. Leave that out.",
                place_of(node.variable, "staleness" if said.staleness else "sync"),
            )
        if said.local_proxy:
            raise StrategyError(
                f"{node.variable} has a proxy, and in a pipeline no other worker reads it. Leave "
                "local_proxy_variable out.",
                place_of(node.variable, "local_proxy_variable"),
            )
        if said.owner not in stages:
            raise StrategyError(
                f"{node.variable} is owned by worker {said.owner}, which computes no stage of the pipeline.",
                place_of(node.variable, "owner"),
            )
