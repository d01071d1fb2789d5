"""Pipeline schedules: the order in which each worker of a pipeline processes the micro-batches."""

from __future__ import annotations

import graphlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

GPIPE = "GPipe"
ONE_F_ONE_B = "1F1B"

SCHEDULES = (GPIPE, ONE_F_ONE_B)
"""By number, as in a strategy."""

BACKWARD_WORK = 2
"""Backward takes about twice as long as forward: one product for the inputs and one for the weights."""


@dataclass(frozen=True, order=True)
class Unit:
    """The work of a pipeline stage for one micro-batch in one direction."""

    stage: int
    micro_batch: int
    is_backward: bool = False

    def __str__(self) -> str:
        return f"{'B' if self.is_backward else 'F'}{self.micro_batch}"


Order = tuple[tuple[Unit, ...], ...]
"""The units of each pipeline stage, in order."""


def make_schedule(stages: int, micro_batches: int, schedule: str, trains: bool = True) -> Order:
    """Returns the order of the units of each pipeline stage.

    GPipe runs forward for all micro-batches before it runs backward, and keeps the activations of all of them. 1F1B
    runs backward for a micro-batch as soon as it can. A stage then keeps the activations of at most as many
    micro-batches as there are stages from it to the last one, itself included.

    Args:
        stages: number of stages.
        micro_batches: number of micro-batches.
        schedule: one of `SCHEDULES`.
        trains: True if there is a backward pass.

    Sources: Y. Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", NeurIPS
    2019; D. Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", SC
    2021, for 1F1B without stale weights.
    """
    return tuple(_of_stage(stage, stages, micro_batches, schedule, trains) for stage in range(stages))


def _of_stage(stage: int, stages: int, micro_batches: int, schedule: str, trains: bool) -> tuple[Unit, ...]:
    forward = [Unit(stage, m) for m in range(micro_batches)]
    if not trains:
        return tuple(forward)
    backward = [Unit(stage, m, is_backward=True) for m in range(micro_batches)]
    if schedule == GPIPE:
        return (*forward, *backward)
    ahead = min(stages - stage, micro_batches)
    order = forward[:ahead]
    for m, back in enumerate(backward):
        order.append(back)
        order += forward[ahead + m : ahead + m + 1]
    return tuple(order)


def max_in_flight(units: Sequence[Unit]) -> int:
    """Returns the largest number of micro-batches that a stage has run forward and not yet backward."""
    highest = kept = 0
    for unit in units:
        kept += -1 if unit.is_backward else 1
        highest = max(highest, kept)
    return highest


def keeps_several(stages: int, micro_batches: int, schedule: str) -> bool:
    """Returns True if a pipeline stage ever runs forward for a micro-batch before backward for the previous one."""
    return max(map(max_in_flight, make_schedule(stages, micro_batches, schedule))) > 1


def usual_needs(unit: Unit, stages: int) -> list[Unit]:
    """Returns the units of other stages that a unit waits for, if each stage sends to its neighbours only."""
    step = 1 if unit.is_backward else -1
    neighbour = unit.stage + step
    return [Unit(neighbour, unit.micro_batch, unit.is_backward)] if 0 <= neighbour < stages else []


def usual_length(unit: Unit) -> int:
    """Returns the duration of a unit if all stages take equally long."""
    return BACKWARD_WORK if unit.is_backward else 1


def simulate(order: Order, length_of: Callable[[Unit], int] = usual_length) -> Mapping[Unit, tuple[int, int]]:
    """Returns the start and end of each unit if only the units take time.

    Raises:
        graphlib.CycleError: two pipeline stages would wait for each other.
    """
    needs: dict[Unit, list[Unit]] = {}
    for units in order:
        for before, unit in zip((None, *units), units, strict=False):
            needs[unit] = [*usual_needs(unit, len(order)), *([before] if before else [])]
    when: dict[Unit, tuple[int, int]] = {}
    for unit in graphlib.TopologicalSorter(needs).static_order():
        start = max((when[one][1] for one in needs[unit]), default=0)
        when[unit] = start, start + length_of(unit)
    return when


def bubble(order: Order, length_of: Callable[[Unit], int] = usual_length) -> Fraction:
    """Returns the share of a step that workers spend waiting, over all workers."""
    when = simulate(order, length_of)
    length = max(end for _, end in when.values())
    work = sum(end - start for start, end in when.values())
    return 1 - Fraction(work, length * len(order))
