"""Slots: the variables that an optimizer keeps for each trained variable."""

from __future__ import annotations

from autodist.graph.find_stages import find_stages
from autodist.graph.parts import Variable
from autodist.graph.step import CapturedStep
from autodist.kernels.place.assign_owners import computed_from, find_served_owners


def find_slots(step: CapturedStep) -> dict[str, tuple[Variable, ...]]:
    """Returns the slots of each trained variable; counters, which serve several variables, belong to none."""
    stages = find_stages(step)
    trained = list(dict.fromkeys(gradient.variable for gradient in step.gradients))
    decided = {step.by_name[name].handle: index for index, name in enumerate(trained)}
    serves = find_served_owners(step, stages, decided)
    read_before = find_served_owners(step, stages, decided, reads_before=True)
    written = {h for write in stages.writes if write in stages.update for h in stages.effects[write].writes}
    found: dict[str, list[Variable]] = {name: [] for name in trained}
    for variable in step.variables:
        handle = variable.handle
        if handle in decided or handle not in written:
            continue
        served = serves.get(handle) or read_before.get(handle) or computed_from(step, stages, decided, handle)
        if len(served) == 1:
            found[trained[next(iter(served))]].append(variable)
    return {name: tuple(slots) for name, slots in found.items()}
