"""Whether what a pipeline says of variables fits its stages."""

from __future__ import annotations

from collections.abc import Mapping

from autodist.errors import StrategyError
from autodist.graph.pipeline_schedule import SCHEDULES, keeps_several
from autodist.logs.formatting import listed
from autodist.proto import strategy_pb2
from autodist.strategies.check_nodes import PlaceOf
from autodist.strategies.variables import SyncedVariable
from autodist.synchronizers import ParameterServer, cut_of, synchronizers_of


def stage_of(strategy: strategy_pb2.Strategy, node: strategy_pb2.VariableNode) -> int:
    """The pipeline stage that holds a variable, of a strategy that `check_pipeline` passes."""
    workers = [stage.worker for stage in strategy.pipeline.stages]
    return workers.index(node.parameter_server.owner)


def pipelines_of(strategy: strategy_pb2.Strategy) -> int:
    """How many pipelines stand side by side."""
    return 1 + len(strategy.pipeline.stages[0].beside)


def workers_of(strategy: strategy_pb2.Strategy, stage: int) -> list[int]:
    """The workers that compute a pipeline stage, the owner of its variables first."""
    said = strategy.pipeline.stages[stage]
    return [said.worker, *(one.worker for one in said.beside)]


def mates_of(strategy: strategy_pb2.Strategy) -> dict[int, list[int]]:
    """For each worker that owns the variables of a pipeline stage, the others that hold the same."""
    found = (workers_of(strategy, stage) for stage in range(len(strategy.pipeline.stages)))
    return {workers[0]: workers[1:] for workers in found}


def _check_seats(strategy: strategy_pb2.Strategy) -> None:
    """Passes a strategy without pipeline stages, or one in which each worker computes one of them in one pipeline.

    Raises:
        StrategyError: it does not.
    """
    seats = [workers_of(strategy, stage) for stage in range(len(strategy.pipeline.stages))]
    workers, pipelines = [worker for one in seats for worker in one], {len(one) for one in seats}
    count = strategy.graph_config.workers or 1
    if seats and (len(pipelines) > 1 or sorted(workers) != list(range(count))):
        raise StrategyError(
            f"the pipeline's stages are computed by the workers {seats}, and there are {count}: each has to compute "
            "one stage of one pipeline, and each stage as many as the others. Correct the builder."
        )
    replicas = len(strategy.graph_config.replicas)
    if seats and replicas % pipelines.pop():
        raise StrategyError(
            f"{replicas} micro-batches cannot be dealt out to {len(seats[0])} pipelines evenly. Correct the builder."
        )
    schedule = SCHEDULES[strategy.pipeline.schedule]
    if strategy.pipeline.recompute and not (seats and keeps_several(len(seats), replicas // len(seats[0]), schedule)):
        raise StrategyError(
            f"the pipeline is to recompute, and no stage has two micro-batches on their way by {schedule}, so that "
            "none would keep less. Correct the builder."
        )


def check_pipeline(strategy: strategy_pb2.Strategy, variables: Mapping[str, SyncedVariable], place_of: PlaceOf) -> None:
    """Passes a strategy without pipeline stages, or one in which each variable is held by the worker of one stage.

    Raises:
        StrategyError: names the variable, the reason and the mend.
    """
    _check_seats(strategy)
    for node in strategy.nodes if strategy.pipeline.stages else ():
        fault = _fault(strategy, node, variables[node.variable].stage)
        if fault is not None:
            problem, option = fault
            raise StrategyError(f"{node.variable} {problem}", place_of(node.variable, option))


def _fault(
    strategy: strategy_pb2.Strategy, node: strategy_pb2.VariableNode, mark: int | None
) -> tuple[str, str] | None:
    """What is wrong with a variable in a pipeline, and the option that says it; None if nothing is.

    Args:
        strategy: with pipeline stages.
        node: of the variable.
        mark: the stage in which the script has made it; None: it does not say.
    """
    if cut_of(node) is not None:
        return "is partitioned, and a pipeline's stages hold whole variables. Leave the partition out.", "partition"
    (said,) = synchronizers_of(node)
    if not isinstance(said, ParameterServer):
        return (
            "is to be all-reduced, and in a pipeline each variable is held by its stage's worker alone. Take it out of "
            "`variables`, and say by the patterns of `stages` where it lies."
        ), "synchronizer"
    if said.asynchronous or said.staleness:
        return (
            "is to be updated asynchronously (sync: false, or staleness), and a pipeline's workers make each step "
            "together. Leave that out."
        ), "staleness" if said.staleness else "sync"
    if said.local_proxy:
        return (
            "has a proxy, and in a pipeline no other worker reads it. Leave local_proxy_variable out."
        ), "local_proxy_variable"
    owners = {stage.worker for stage in strategy.pipeline.stages}
    if said.owner not in owners:
        return (
            f"is owned by worker {said.owner}, which is not the first of those that compute a stage: these are "
            f"{listed(map(str, sorted(owners)))}. Take one of them for owner."
        ), "owner"
    stage = stage_of(strategy, node)
    if mark is not None and mark != stage:
        return (
            f"is made in ad.stage({mark}), and is given to worker {said.owner}, which computes stage {stage}. Leave "
            "one of them out, or let both say the same."
        ), "owner"
    return None
