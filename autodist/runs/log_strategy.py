"""Logs the strategy of a run's first training step on the chief."""

from __future__ import annotations

import io
import logging
from collections.abc import Mapping, Sequence

import rich.console

from autodist.graph.gradient_rows import gradient_rows
from autodist.graph.step import CapturedStep, ReplicatedStep
from autodist.kernels import Context
from autodist.proto import strategy_pb2
from autodist.resources import ResourceSpec
from autodist.runs.pipeline_figures import figures_of
from autodist.runs.stage_costs import Rewriting, costs_of
from autodist.strategies import strategy_table
from autodist.strategies.stage_table import stage_tables

log = logging.getLogger("autodist")

WIDTH = 150
"""Columns of the table if the log goes to no terminal."""


def log_strategy(
    strategy: strategy_pb2.Strategy,
    step: CapturedStep,
    rewritten: ReplicatedStep | None,
    spec: ResourceSpec,
    columns: int | None,
    shapes: Mapping[str, Sequence[int]],
    seen: Rewriting | None = None,
) -> None:
    """Logs the strategy as a table; for a pipeline, also the work of its stages.

    Args:
        strategy: the plan for the step.
        step: the captured step.
        rewritten: the rewritten step, if it exists already; not needed with one worker.
        spec: the machines.
        columns: width of the terminal; None without a terminal.
        shapes: shapes of the step's inputs in the chief's part of the first batch, if known.
        seen: the rewriting of the step, if it exists already.
    """
    if not log.isEnabledFor(logging.INFO):
        return
    # Written to a buffer: rich's capture also flushes standard output, which ends the process if nobody reads it.
    text, width = io.StringIO(), columns or WIDTH
    console = rich.console.Console(file=text, width=width, force_jupyter=False)
    names = [worker.name for worker in spec.workers]
    held, rows = _held_bytes(step, rewritten, len(names)), gradient_rows(step, shapes)
    console.print(strategy_table(strategy, step, names, width, held, rows, spec))
    if strategy.pipeline.stages:
        costs = costs_of(step, Context(strategy, 0), shapes, seen)
        for table in stage_tables(figures_of(strategy, step, names, held, costs)):
            console.print(table)
    log.info("the strategy:\n%s", text.getvalue())


def _held_bytes(step: CapturedStep, rewritten: ReplicatedStep | None, workers: int) -> list[int] | None:
    """Returns the bytes of variables that each worker holds; None if the step is not rewritten yet."""
    if workers > 1 and rewritten is None:
        return None
    placed = ReplicatedStep(step.graph_def, step.variables) if rewritten is None else rewritten
    held = [0] * workers
    for variable in placed.variables:
        owner = placed.owners.get(variable.name)
        for worker in range(workers) if owner is None else (owner, *placed.stage_group.get(owner, ())):
            held[worker] += variable.byte_size
    return held
