"""Figures of a pipeline for the tables of runs and plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce

from autodist.graph.partial_count import PartialCount
from autodist.graph.pipeline_schedule import SCHEDULES, Unit, bubble, make_schedule
from autodist.graph.step import CapturedStep
from autodist.proto import strategy_pb2
from autodist.runs.stage_costs import Link, StageCosts
from autodist.strategies import synced_variables
from autodist.strategies.check_pipeline import pipelines_of, stage_of, workers_of
from autodist.strategies.stage_table import CutFigures, PipelineFigures, StageFigures

_NOT_KNOWN = PartialCount(is_least=True)


def figures_of(
    strategy: strategy_pb2.Strategy,
    step: CapturedStep,
    names: Sequence[str],
    held: Sequence[int] | None,
    costs: StageCosts | None,
) -> PipelineFigures:
    """Returns the bytes that each stage of a pipeline holds, its FLOPs, and the bytes it sends to other stages.

    Args:
        strategy: strategy with pipeline stages.
        step: the captured step.
        names: names of the workers.
        held: bytes of variables that each worker holds, optimizer slots included; None: not known.
        costs: costs of the stages; None if unknown.
    """
    variables = {variable.name: variable for variable in synced_variables(step)}
    seats = [workers_of(strategy, stage) for stage in range(len(strategy.pipeline.stages))]
    stage_variables = [
        [variables[n.variable] for n in strategy.nodes if stage_of(strategy, n) == s] for s in range(len(seats))
    ]
    none = [_NOT_KNOWN] * len(seats)
    forward, backward = (none, none) if costs is None else (costs.forward, costs.backward)
    pipelines, schedule = pipelines_of(strategy), SCHEDULES[strategy.pipeline.schedule]
    micro_batches = len(strategy.graph_config.replicas) // pipelines
    order = make_schedule(len(seats), micro_batches, schedule)
    counts = [forward, backward]

    def flops_of(unit: Unit) -> int:
        return counts[unit.is_backward][unit.stage].count

    is_known = any(one.count for one in forward) and not any(one.is_least for one in (*forward, *backward))
    return PipelineFigures(
        schedule=schedule,
        micro_batches=micro_batches,
        pipelines=pipelines,
        waits=float(bubble(order)),
        waits_by_flops=float(bubble(order, flops_of)) if is_known else None,
        examples=1 if costs is None else costs.examples,
        is_fed=costs is not None and costs.is_fed,
        stages=tuple(
            StageFigures(
                workers=tuple(names[worker] for worker in workers),
                variables=len(stage_variables[stage]),
                bytes=sum(variable.byte_size for variable in stage_variables[stage]),
                held=None if held is None else max(held[worker] for worker in workers),
                forward=forward[stage],
                backward=backward[stage],
            )
            for stage, workers in enumerate(seats)
        ),
        cuts=() if costs is None else _cuts(seats, costs),
    )


def _cuts(seats: Sequence[Sequence[int]], costs: StageCosts) -> tuple[CutFigures, ...]:
    stages = {worker: stage for stage, workers in enumerate(seats) for worker in workers}
    each, once = (_between_stages(ways, stages) for ways in (costs.each, costs.once))
    return tuple(
        CutFigures(source=way[0], target=way[1], each=each.get(way, PartialCount()), once=once.get(way, PartialCount()))
        for way in sorted(each.keys() | once.keys())
    )


def _between_stages(ways: Mapping[Link, PartialCount], stages: Mapping[int, int]) -> dict[Link, PartialCount]:
    """Returns the largest transfer from a worker of one stage to a worker of another, by pair of stages."""
    counts: dict[Link, list[PartialCount]] = {}
    for (source, target), tally in ways.items():
        counts.setdefault((stages[source], stages[target]), []).append(tally)
    return {way: reduce(_larger, tallies) for way, tallies in counts.items()}


def _larger(one: PartialCount, other: PartialCount) -> PartialCount:
    return PartialCount(max(one.count, other.count), one.is_least or other.is_least)
