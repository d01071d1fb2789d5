"""Slots: the variables that an optimizer keeps for each trained variable."""

from __future__ import annotations

from autodist.graph.find_stages import find_stages
from autodist.graph.parts import Variable
from autodist.graph.step import Step
from autodist.kernels.place.assign_owners import computed_from, find_served_owners


def find_slots(item: Step) -> dict[str, tuple[Variable, ...]]:
    """Returns the slots of each trained variable; counters, which serve several variables, belong to none."""
    stages = find_stages(item)
    trained = list(dict.fromkeys(gradient.variable for gradient in item.gradients))
    decided = {item.by_name[name].handle: index for index, name in enumerate(trained)}
    serves = find_served_owners(item, stages, decided)
    read_before = find_served_owners(item, stages, decided, reads_before=True)
    written = {h for write in stages.writes if write in stages.update for h in stages.effects[write].writes}
    found: dict[str, list[Variable]] = {name: [] for name in trained}
    for variable in item.variables:
        handle = variable.handle
        if handle in decided or handle not in written:
            continue
        served = serves.get(handle) or read_before.get(handle) or computed_from(item, stages, decided, handle)
        if len(served) == 1:
            found[trained[next(iter(served))]].append(variable)
    return {name: tuple(slots) for name, slots in found.items()}
