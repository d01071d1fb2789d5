"""Logs the strategy of a run's first training step on the chief, and computes the figures of pipelines for tables."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import rich.console
from rich.table import Table

from autodist.errors import AutoDistError
from autodist.graph.activations import activation_bytes
from autodist.graph.flops import with_inferred_shapes
from autodist.graph.gradient_rows import gradient_rows
from autodist.graph.partial_count import PartialCount
from autodist.graph.pipeline_schedule import SCHEDULES, Unit, bubble, make_schedule
from autodist.graph.step import CapturedStep, ReplicatedStep
from autodist.kernels import Context
from autodist.proto import strategy_pb2
from autodist.resources import ResourceSpec
from autodist.runs.memory_needs import MemoryNeeds, available_memory, has_gpus, held_bytes
from autodist.runs.mesh_costs import MeshCosts, mesh_costs
from autodist.runs.stage_costs import Link, Rewriting, StageCosts, costs_of
from autodist.strategies import strategy_table, synced_variables
from autodist.strategies.choice_table import ChoiceFigures
from autodist.strategies.mesh_table import mesh_tables, requested_figures
from autodist.strategies.stage_table import CutFigures, PipelineFigures, StageFigures, stage_tables
from autodist.synchronizers import stages_of, workers_of_stages

log = logging.getLogger("autodist")

WIDTH = 150
"""Columns of the table if the log goes to no terminal."""

_NOT_KNOWN = PartialCount(is_least=True)


def describe_strategy(
    strategy: strategy_pb2.Strategy,
    step: CapturedStep,
    rewritten: ReplicatedStep | None,
    spec: ResourceSpec,
    columns: int | None,
    shapes: Mapping[str, Sequence[int]],
    seen: Rewriting | None = None,
) -> tuple[str, str | None]:
    """Returns the strategy as a table, for a pipeline also the work of its stages; and the memory that it needs.

    Args:
        strategy: the plan for the step.
        step: the captured step.
        rewritten: the rewritten step, if it exists already; not needed with one worker.
        spec: the machines.
        columns: width of the terminal; None without a terminal.
        shapes: shapes of the step's inputs in the chief's part of the first batch, if known.
        seen: the rewriting of the step, if it exists already.

    Returns:
        The tables, and a sentence about the chief's memory; None: it is not known.
    """
    plan = _Plan(strategy, step, rewritten, spec, shapes, seen)
    # Written to a buffer: rich's capture also flushes standard output, which ends the process if nobody reads it.
    text, width = io.StringIO(), columns or WIDTH
    console = rich.console.Console(file=text, width=width, force_jupyter=False)
    if strategy.HasField("mesh"):
        costs = plan.costs_on_mesh()
        tables, needs = plan.tables_on_mesh(width, costs), None if costs is None else plan.needs_on_mesh(costs)
    else:
        tables, needs = plan.tables(width), plan.needs()
    for table in tables:
        console.print(table)
    available = available_memory(spec.workers, 0)
    return text.getvalue(), None if needs is None else f"memory of {spec.workers[0].name}: {needs.described(available)}"


def log_strategy(tables: str, memory: str | None) -> None:
    """Logs the result of `describe_strategy`."""
    log.info("the strategy:\n%s", tables)
    if memory is not None:
        log.info("%s", memory)


@dataclass(frozen=True)
class _Plan:
    """A step with its strategy; the fields are the arguments of `describe_strategy`."""

    strategy: strategy_pb2.Strategy
    step: CapturedStep
    rewritten: ReplicatedStep | None
    spec: ResourceSpec
    shapes: Mapping[str, Sequence[int]]
    seen: Rewriting | None

    def needs(self) -> MemoryNeeds | None:
        """Returns the memory that the chief needs for a step; None if the step or its batch is not known yet."""
        strategy, step, held = self.strategy, self.step, self._held()
        if held is None or not self.shapes or strategy.pipeline.stages or strategy.recomputed_blocks:
            return None
        inferred = with_inferred_shapes(step, sorted(step.named), self.shapes)
        return MemoryNeeds.of(step, held[0], activation_bytes(step, inferred), strategy)

    def needs_on_mesh(self, costs: MeshCosts) -> MemoryNeeds | None:
        """Returns the memory that a place needs, or the chief without GPUs; None for a pipeline."""
        if self.strategy.pipeline.stages:
            return None
        if has_gpus(self.spec.workers[0]):
            return MemoryNeeds.of(costs.sharded, costs.held_at_place, costs.activations, self.strategy)
        return MemoryNeeds.of(costs.of_places, costs.held(0), costs.activations, self.strategy)

    def tables(self, width: int) -> Iterator[Table]:
        strategy, step, held = self.strategy, self.step, self._held()
        rows = gradient_rows(step, self.shapes)
        yield strategy_table(strategy, step, self._names, width, held, rows, self.spec)
        if strategy.HasField("choice"):
            yield ChoiceFigures.of(strategy.choice).table()
        yield from self._stage_tables(held)

    def tables_on_mesh(self, width: int, costs: MeshCosts | None) -> Iterator[Table]:
        strategy, step = self.strategy, self.step
        script = {} if step.annotations is None else step.annotations.variables
        figures = requested_figures(strategy, step, script) if costs is None else costs.figures()
        yield from mesh_tables(figures, f"{strategy.builder}: {figures.title}", width)
        held = None if costs is None else [costs.held(worker.index) for worker in self.spec.workers]
        yield from self._stage_tables(held)

    def costs_on_mesh(self) -> MeshCosts | None:
        """Returns the costs on a mesh; None for a session's graph, since the parts that will run are not known."""
        if not (self.step.targets or self.step.outputs):
            return None
        try:
            return mesh_costs(self.step, Context(self.strategy, 0), self.shapes, self.seen)
        except AutoDistError:  # raised again when the step is rewritten for training
            return None

    @property
    def _names(self) -> list[str]:
        return [worker.name for worker in self.spec.workers]

    def _stage_tables(self, held: Sequence[int] | None) -> Iterator[Table]:
        if self.strategy.pipeline.stages:
            costs = costs_of(self.step, Context(self.strategy, 0), self.shapes, self.seen)
            yield from stage_tables(figures_of(self.strategy, self.step, self._names, held, costs))

    def _held(self) -> list[int] | None:
        """Returns the bytes of variables that each worker holds; None if the step is not rewritten yet."""
        workers = len(self.spec.workers)
        if workers > 1 and self.rewritten is None:
            return None
        return held_bytes(self.step if self.rewritten is None else self.rewritten, self.strategy, workers)


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
    stages = stages_of(strategy)
    stage_workers = workers_of_stages(strategy)
    stage_variables = [
        [variables[n.variable] for n in strategy.nodes if n.parameter_server.owner == group.workers[0]]
        for group in stages.groups
    ]
    none = [_NOT_KNOWN] * len(stage_workers)
    forward, backward = (none, none) if costs is None else (costs.forward, costs.backward)
    pipelines, schedule = stages.pipelines, SCHEDULES[strategy.pipeline.schedule]
    micro_batches = len(strategy.graph_config.replicas) // pipelines
    order = make_schedule(len(stage_workers), micro_batches, schedule)
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
            for stage, workers in enumerate(stage_workers)
        ),
        cuts=() if costs is None else _cuts(stage_workers, costs),
    )


def _cuts(stage_workers: Sequence[Sequence[int]], costs: StageCosts) -> tuple[CutFigures, ...]:
    stages = {worker: stage for stage, workers in enumerate(stage_workers) for worker in workers}
    each, once = (_between_stages(links, stages) for links in (costs.each, costs.once))
    return tuple(
        CutFigures(
            source=link[0], target=link[1], each=each.get(link, PartialCount()), once=once.get(link, PartialCount())
        )
        for link in sorted(each.keys() | once.keys())
    )


def _between_stages(links: Mapping[Link, PartialCount], stages: Mapping[int, int]) -> dict[Link, PartialCount]:
    """Returns the largest transfer from a worker of one stage to a worker of another, by pair of stages."""
    counts: dict[Link, list[PartialCount]] = {}
    for (source, target), count in links.items():
        counts.setdefault((stages[source], stages[target]), []).append(count)
    return {link: reduce(_larger, found) for link, found in counts.items()}


def _larger(one: PartialCount, other: PartialCount) -> PartialCount:
    return PartialCount(max(one.count, other.count), one.is_least or other.is_least)
