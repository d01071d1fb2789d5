"""Checks that the options of variables fit the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Mapping

from autodist.errors import StrategyError
from autodist.graph.pipeline_schedule import SCHEDULES, keeps_several
from autodist.logs.formatting import listed
from autodist.proto import strategy_pb2
from autodist.strategies.check_nodes import PlaceOf
from autodist.strategies.variables import SyncedVariable
from autodist.synchronizers import ParameterServer, mesh_of, partitioning_of, row_axes_of, stages_of, synchronizers_of


def _check_stage_workers(strategy: strategy_pb2.Strategy) -> None:
    """Checks that each worker computes one stage of one pipeline, if there are pipeline stages.

    Raises:
        StrategyError: the strategy's stages, workers or micro-batches do not fit.
    """
    by_stage = [list(group.workers) for group in stages_of(strategy).groups]
    workers, pipelines = [worker for one in by_stage for worker in one], {len(one) for one in by_stage}
    count = _row_length(strategy)
    if by_stage and (len(pipelines) > 1 or sorted(workers) != list(range(count))):
        raise StrategyError(
            f"the pipeline's stages are computed by the workers {by_stage}, but there are {count}: each must compute "
            "one stage of one pipeline, and all stages need equally many workers. Correct the builder."
        )
    replicas = len(strategy.graph_config.replicas)
    if by_stage and replicas % pipelines.pop():
        raise StrategyError(
            f"{replicas} micro-batches cannot be split evenly over {len(by_stage[0])} pipelines. Correct the builder."
        )
    schedule = SCHEDULES[strategy.pipeline.schedule]
    if strategy.pipeline.recompute and not (
        by_stage and keeps_several(len(by_stage), replicas // len(by_stage[0]), schedule)
    ):
        raise StrategyError(
            f"the pipeline sets recompute, but under {schedule} no stage has two micro-batches in flight, so that "
            "recomputation would save no memory. Correct the builder."
        )


def _row_length(strategy: strategy_pb2.Strategy) -> int:
    """Returns the number of workers of a pipeline; on a mesh, each row is one."""
    if not strategy.HasField("mesh"):
        return strategy.graph_config.workers or 1
    return mesh_of(strategy).count(row_axes_of(strategy))


def check_pipeline(strategy: strategy_pb2.Strategy, variables: Mapping[str, SyncedVariable], place_of: PlaceOf) -> None:
    """Checks that each variable is held by the worker of one stage, if there are pipeline stages.

    Raises:
        StrategyError: names the variable, the reason and the fix.
    """
    _check_stage_workers(strategy)
    for node in strategy.nodes if strategy.pipeline.stages else ():
        fault = _fault(strategy, node, variables[node.variable].stage)
        if fault is not None:
            problem, option = fault
            raise StrategyError(f"{node.variable} {problem}", place_of(node.variable, option))


def _fault(
    strategy: strategy_pb2.Strategy, node: strategy_pb2.VariableNode, mark: int | None
) -> tuple[str, str] | None:
    """Returns the problem with a variable in a pipeline, and the option that causes it; None if there is none.

    Args:
        strategy: a strategy with pipeline stages.
        node: the node of the variable.
        mark: the stage in which the script created it; None: unspecified.
    """
    if partitioning_of(node) is not None:
        return "is partitioned, but pipeline stages hold whole variables. Leave the partition out.", "partition"
    (synchronizer,) = synchronizers_of(node)
    if not isinstance(synchronizer, ParameterServer):
        return (
            "is to be all-reduced, but in a pipeline only its stage's worker holds a variable. Remove it from "
            "`variables`, and choose its stage by the patterns of `stages`."
        ), "synchronizer"
    if synchronizer.asynchronous or synchronizer.staleness:
        return (
            "is to be updated asynchronously (sync: false, or staleness), but the workers of a pipeline run each step "
            "together. Leave that out."
        ), "staleness" if synchronizer.staleness else "sync"
    if synchronizer.local_proxy:
        return (
            "has a proxy, but in a pipeline no other worker reads it. Leave local_proxy_variable out."
        ), "local_proxy_variable"
    stages = stages_of(strategy)
    owners = {group.workers[0] for group in stages.groups}
    if synchronizer.owner not in owners:
        return (
            f"is owned by worker {synchronizer.owner}, which is not the first of those that compute a stage: these are "
            f"{listed(map(str, sorted(owners)))}. Use one of them as owner."
        ), "owner"
    stage = stages.stage_of(synchronizer.owner)
    if mark is not None and mark != stage:
        return (
            f"is made in ad.stage({mark}), but its owner is worker {synchronizer.owner}, which computes stage {stage}. "
            "Leave one of them out, or make both agree."
        ), "owner"
    return None
