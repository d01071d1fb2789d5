"""Assignment of holders to variables and shards by the strategy, and to slots by the variables that they serve."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from autodist.graph.effects import group_by_handle
from autodist.graph.find_stages import find_stages
from autodist.graph.names import node_of
from autodist.graph.ops import Trait
from autodist.graph.parts import Aggregation, Variable
from autodist.graph.stages import Stages
from autodist.graph.step import CapturedStep, PlacedStep
from autodist.graph.walks import reach
from autodist.kernels.base import Context, Kernel
from autodist.kernels.normalise.inline_branches import inline_shared_updates
from autodist.kernels.place.slots import ServedVariables
from autodist.kernels.plan import Plan
from autodist.placement.group import Group
from autodist.placement.holder import Holder
from autodist.proto import strategy_pb2


@dataclass(frozen=True)
class AssignOwners(Kernel[CapturedStep, PlacedStep]):
    """Sets the holder of each variable that is partitioned, or that only some workers hold."""

    name: ClassVar[str] = "assign-owners"

    def apply(self, step: CapturedStep, context: Context) -> PlacedStep:
        holders = step.holders if context.workers == 1 else _find_holders(step, context.plan)
        return PlacedStep.of(step, holders={name: one for name, one in holders.items() if not one.is_everywhere})


def find_holders(step: CapturedStep, strategy: strategy_pb2.Strategy) -> dict[str, Holder]:
    """Returns the holders of all variables of a step, by name, with the copies that steps read."""
    plan = Plan(strategy)
    found = _find_holders(inline_shared_updates(step, plan), plan)
    everyone = plan.placement.all_workers
    holders = {v.name: found.get(v.name, Holder.whole(v.shape, everyone)) for v in step.variables}
    return {name: holder.with_copies(name, plan.copies) for name, holder in holders.items()}


def _find_holders(step: CapturedStep, plan: Plan) -> dict[str, Holder]:
    """Returns the holders of variables; those from an earlier step are kept, with the copies that a write refreshes.

    A slot is partitioned and placed like the variables that it serves. These are the variables whose update reads it,
    or else those that it is computed from (for an average of weights). A slot that serves variables of several owners,
    or a variable that every worker holds, is held by every worker. So is a slot of a partitioned variable with another
    shape. If all variables are asynchronous, the owner of the first one owns the update counters.
    """
    holders = dict(step.holders)
    for name in plan.placement.owners:
        if name in step.by_name and name not in holders:
            holders[name] = plan.placement.holder(name, step.by_name[name].shape)
    if not all(one.is_everywhere for one in holders.values()):
        holders |= dict(_slots(step, holders))
    if plan.is_asynchronous:
        owner = Group.of_workers([plan.first_owner])
        for variable in find_counters(step):
            holders.setdefault(variable.name, Holder.whole(variable.shape, owner))
    return holders


def _slots(step: CapturedStep, holders: Mapping[str, Holder]) -> Iterable[tuple[str, Holder]]:
    """Yields the holders of variables without a holder, by the variables that they serve."""
    left = [variable for variable in step.variables if variable.name not in holders]
    if not left:
        return
    stages = find_stages(step)
    served = ServedVariables(step, stages, (step.by_name[name].handle for name in holders if name in step.by_name))
    for variable in left:
        is_updated = any(variable.handle in stages.effects[w].writes for w in stages.writes if w in stages.update)
        handles = served.of(variable.handle) if is_updated else served.written_with(variable.handle)
        holder = _common(variable, [step.by_handle[handle].name for handle in handles], holders)
        if holder is not None:
            yield variable.name, holder


def _common(slot: Variable, served: Iterable[str], holders: Mapping[str, Holder]) -> Holder | None:
    """Returns the holder of a slot that serves some variables, if these have one group, or only one is partitioned."""
    by_group: dict[object, Holder] = {}
    for name in served:
        holder = holders[name]
        by_group[holder.slices[0].group if holder.partitioning is None else name] = holder
    if len(by_group) != 1:
        return None
    [holder] = by_group.values()
    if holder.partitioning is None:
        return Holder.whole(slot.shape, holder.slices[0].group)
    return holder.without_copies() if holder.shape == slot.shape else None


def find_counters(step: CapturedStep) -> list[Variable]:
    """Returns the update counters, which every step writes with values that do not depend on the batch.

    The updates read them (Adam's number of steps), or the script declares that one replica's write is enough. Keras
    declares this for an optimizer's `iterations`.
    """
    stages = find_stages(step)
    read = _read_by_updates(step, stages)
    written = _written_alike(step, stages)
    return [
        v for v in step.variables
        if v.handle in written and (v.handle in read or v.aggregation is Aggregation.ONLY_FIRST_REPLICA)
    ]  # fmt: skip


def _read_by_updates(step: CapturedStep, stages: Stages) -> set[str]:
    """Returns the handles of variables, besides gradients, that the updates read."""
    gradients = {t for g in stages.gradients for t in g.tensors}
    writes = [w for w in stages.writes if w in stages.update]
    found = reach(writes, lambda name: [node_of(i) for i in step.graph_index.inputs(name) if i not in gradients])
    return {h for name in found if name in stages.effects for h in stages.effects[name].reads}


def _written_alike(step: CapturedStep, stages: Stages) -> set[str]:
    """Returns the handles that the compute part writes with values that depend on no batch and no random number."""
    batch = set(map(node_of, step.batch_axes))
    batch |= {node.name for node in step.graph_index.having(Trait.SEEDED)}
    by_handle = group_by_handle((write, stages.effects[write].writes) for write in stages.state_writes)
    seeds = {v.handle for v in step.variables if v.is_seed}
    of_batch = reach(batch, step.graph_index.readers)
    return {h for h, writes in by_handle.items() if h not in seeds and of_batch.isdisjoint(writes)}
