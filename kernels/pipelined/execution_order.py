"""Execution order: a worker of a pipeline executes its units one after another."""

from __future__ import annotations

import graphlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import cast

import tensorflow as tf

from autodist.errors import PartsError, SplitControlFlowError
from autodist.graph.control_flow import find_inside
from autodist.graph.pipeline_schedule import ONE_F_ONE_B, Unit, make_schedule
from autodist.graph.split import split
from autodist.graph.step import Step
from autodist.graph.step_editor import StepEditor
from autodist.graph.subgraph import subgraph
from autodist.kernels.context import Context
from autodist.kernels.pipelined.assign_stages import passes_no_stage
from autodist.kernels.pipelined.stage_placement import StagePlacement
from autodist.options.fields import OptionError

Turns = Mapping[int, Sequence[Unit]]
"""The units of each worker, in execution order."""

NodesOfUnits = Mapping[Unit, Sequence[str]]
"""The nodes of each of a worker's units, in topological order; units are in execution order."""


def find_order(placement: StagePlacement, context: Context) -> Turns:
    """Determines the order in which each worker executes its units.

    Raises:
        StrategyError: units wait for each other in a cycle.
    """
    try:
        parts = split(placement.step, lambda name: placement.unit_of(name) if name in placement.needed else None)
    except PartsError as error:
        raise OptionError(
            "stages",
            f"the pipeline stages wait for each other: {_cycle_of(error)}. Put the variables that these nodes use into "
            "one stage.",
        ) from error
    except SplitControlFlowError as error:
        raise passes_no_stage(f"{error.reader} needs {error.node}, and they are in different stages") from error
    needs = cast(Mapping[Unit, frozenset[Unit]], parts.needs)
    trains = any(unit.is_backward for unit in needs)
    order = {
        worker: [unit for unit in units if unit in needs]
        for worker, units in _scheduled(placement, context, trains).items()
    }
    waits: dict[Unit, set[Unit]] = {unit: set(before) for unit, before in needs.items()}
    for units in order.values():
        for before, unit in pairwise(units):
            waits[unit].add(before)
    try:
        graphlib.TopologicalSorter(waits).prepare()
    except graphlib.CycleError as error:
        cycle = ", ".join(f"{unit} of stage {unit.stage}" for unit in reversed(error.args[1]))
        fix = (
            "Set schedule: GPipe"
            if context.plan.schedule == ONE_F_ONE_B
            else "Set micro_batches: 1, or use a strategy without pipeline stages"
        )
        raise OptionError(
            "schedule" if context.plan.schedule == ONE_F_ONE_B else "micro_batches",
            f"under the schedule {context.plan.schedule}, micro-batches wait for each other ({cycle}), since the step "
            f"uses a value that depends on all of them. {fix}.",
        ) from error
    return order


def _cycle_of(error: PartsError) -> str:
    units = cast(tuple[Unit, ...], error.keys)
    return ", ".join(
        f"stage {unit.stage} sends to stage {after.stage} ({' → '.join(way)})"
        for unit, after, way in zip(units, (*units[1:], units[0]), error.ways, strict=True)
    )


def _scheduled(placement: StagePlacement, context: Context, trains: bool) -> Turns:
    """Returns the schedule of each worker, over the micro-batches of its own pipeline."""
    schedule = make_schedule(
        len(context.placement.stages.groups), placement.micro_batches, context.plan.schedule, trains
    )
    return {
        worker: [replace(unit, micro_batch=pipeline * placement.micro_batches + unit.micro_batch) for unit in units]
        for group, units in zip(context.placement.stages.groups, schedule, strict=True)
        for pipeline, worker in enumerate(group.workers)
    }  # fmt: skip


def nodes_of_units(placement: StagePlacement, order: Sequence[Unit]) -> NodesOfUnits:
    """Returns the nodes that a worker computes in each of its units, without the bodies of loops and branches."""
    nodes: dict[Unit, list[str]] = {unit: [] for unit in order}
    inside = set(find_inside(placement.graph_index))
    for name in placement.graph_index.order:
        if name in placement.needed and name not in inside:
            unit = placement.unit_of(name)
            if unit in nodes:
                nodes[unit].append(name)
    return nodes


def enforce_order(editor: StepEditor[Step], placement: StagePlacement, nodes: NodesOfUnits) -> dict[Unit, str]:
    """Makes each of a worker's units start after the previous one has ended.

    Returns:
        For each unit but the first, the node that it waits for.
    """
    starts: dict[Unit, str] = {}
    inside = set(find_inside(placement.graph_index))
    members: Mapping[str, Unit] = {name: unit for unit, names in nodes.items() for name in names}
    for before, unit in pairwise(nodes):
        last = [
            n for n in nodes[before] if not any(members.get(c) == before for c in placement.graph_index.consumers[n])
        ]
        first = [
            n for n in nodes[unit]
            if not any(members.get(s) == unit or s in inside for s in placement.graph_index.data[n])
        ]  # fmt: skip
        with subgraph(editor, f"pipeline/{before}_then_{unit}") as f, tf.control_dependencies([f.after(last)]):
            starts[unit] = f.name(tf.no_op())
        for name in first:
            editor.add_control(name, [starts[unit]])
    return starts
