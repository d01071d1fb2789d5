"""Turns: a worker of a pipeline takes up its units one after the other."""

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
from autodist.graph.step_editor import StepEditor
from autodist.graph.subgraph import subgraph
from autodist.kernels.base import Context
from autodist.kernels.pipelined.assign_stages import passes_no_stage
from autodist.kernels.pipelined.stage_placement import StagePlacement
from autodist.options.fields import OptionError

Turns = Mapping[int, Sequence[Unit]]
"""For each worker its units, one after the other."""

NodesOfUnits = Mapping[Unit, Sequence[str]]
"""For each of a worker's units, in the order in which it takes them up, its nodes, each after what it needs."""


def find_order(homes: StagePlacement, context: Context) -> Turns:
    """In which order each worker takes up its units.

    Raises:
        StrategyError: there is none, since units wait for each other in a circle.
    """
    try:
        parts = split(homes.item, lambda name: homes.unit_of(name) if name in homes.needed else None)
    except PartsError as error:
        raise OptionError(
            "stages",
            f"the pipeline stages wait for each other: {_told(error)}. Put the variables that these nodes use into one "
            "stage.",
        ) from error
    except SplitControlFlowError as error:
        raise passes_no_stage(f"{error.reader} needs {error.node}, and not both are of one stage") from error
    needs = cast(Mapping[Unit, frozenset[Unit]], parts.needs)
    trains = any(unit.is_backward for unit in needs)
    order = {
        worker: [unit for unit in units if unit in needs]
        for worker, units in _scheduled(homes, context, trains).items()
    }
    waits: dict[Unit, set[Unit]] = {unit: set(before) for unit, before in needs.items()}
    for units in order.values():
        for before, unit in pairwise(units):
            waits[unit].add(before)
    try:
        graphlib.TopologicalSorter(waits).prepare()
    except graphlib.CycleError as error:
        circle = ", ".join(f"{unit} of stage {unit.stage}" for unit in reversed(error.args[1]))
        mend = (
            "Take schedule: GPipe"
            if context.plan.schedule == ONE_F_ONE_B
            else "Take micro_batches: 1, or a strategy without pipeline stages"
        )
        raise OptionError(
            "schedule" if context.plan.schedule == ONE_F_ONE_B else "micro_batches",
            f"by the schedule {context.plan.schedule} micro-batches wait for each other ({circle}), since the step "
            f"computes with what all of them make. {mend}.",
        ) from error
    return order


def _told(error: PartsError) -> str:
    units = cast(tuple[Unit, ...], error.keys)
    return ", ".join(
        f"stage {unit.stage} gives to stage {after.stage} ({' → '.join(way)})"
        for unit, after, way in zip(units, (*units[1:], units[0]), error.ways, strict=True)
    )


def _scheduled(homes: StagePlacement, context: Context, trains: bool) -> Turns:
    """The schedule of each pipeline's own micro-batches, by worker."""
    schedule = make_schedule(len(context.plan.stages), homes.micro_batches, context.plan.schedule, trains)
    return {
        worker: [replace(unit, micro_batch=pipeline * homes.micro_batches + unit.micro_batch) for unit in units]
        for workers, units in zip(context.plan.seats, schedule, strict=True) for pipeline, worker in enumerate(workers)
    }  # fmt: skip


def nodes_of_units(homes: StagePlacement, order: Sequence[Unit]) -> NodesOfUnits:
    """What a worker computes in each of its units, the insides of loops and branches left aside."""
    nodes: dict[Unit, list[str]] = {unit: [] for unit in order}
    inside = set(find_inside(homes.graph_index))
    for name in homes.graph_index.order:
        if name in homes.needed and name not in inside:
            unit = homes.unit_of(name)
            if unit in nodes:
                nodes[unit].append(name)
    return nodes


def take_turns(editor: StepEditor, homes: StagePlacement, nodes: NodesOfUnits) -> dict[Unit, str]:
    """Lets each of a worker's units begin when the one before it has ended.

    Returns:
        For each unit but the first the node that it waits for.
    """
    turns: dict[Unit, str] = {}
    inside = set(find_inside(homes.graph_index))
    members: Mapping[str, Unit] = {name: unit for unit, names in nodes.items() for name in names}
    for before, unit in pairwise(nodes):
        last = [n for n in nodes[before] if not any(members.get(c) == before for c in homes.graph_index.consumers[n])]
        first = [
            n for n in nodes[unit]
            if not any(members.get(s) == unit or s in inside for s in homes.graph_index.data[n])
        ]  # fmt: skip
        with subgraph(editor, f"pipeline/{before}_then_{unit}") as f, tf.control_dependencies([f.after(last)]):
            turns[unit] = f.name(tf.no_op())
        for name in first:
            editor.add_control(name, [turns[unit]])
    return turns
