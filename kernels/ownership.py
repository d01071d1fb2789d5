"""Which worker holds a variable: parameter servers as the strategy says, and the slots that go with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from autodist.graph.item import GraphItem
from autodist.graph.names import is_control, node_of, tensor
from autodist.graph.stages import Stages, find_stages
from autodist.kernels.base import Context, Kernel
from autodist.kernels.plan import Plan
from autodist.proto import strategy_pb2

EVERY_WORKER = -1
"""Stands for an owner where every worker holds the variable."""

Owners = frozenset[int]


@dataclass(frozen=True)
class AssignOwners(Kernel):
    """Notes the owner of every variable that one worker alone holds."""

    name: ClassVar[str] = "assign-owners"

    def apply(self, item: GraphItem, context: Context) -> GraphItem:
        if context.workers == 1:
            return replace(item, owners={})
        # What an earlier step has decided holds, also that every worker has a variable.
        owners = {**find_owners(item, context.strategy), **item.owners}
        return replace(item, owners={name: owner for name, owner in owners.items() if owner != EVERY_WORKER})


def find_owners(item: GraphItem, strategy: strategy_pb2.Strategy) -> Mapping[str, int]:
    """The owner of each variable that a parameter server holds, by the variable's name.

    What an update keeps beside a variable (a slot) goes where the variables are that it serves: those whose update
    reads it, else those that it is computed from (an average of weights). What serves variables of several owners, or
    one that every worker holds, is held by every worker.
    """
    plan = Plan(strategy)
    by_variable = {node.variable: plan.owner(node.variable) for node in strategy.nodes}
    owners = {name: owner for name, owner in by_variable.items() if owner is not None and name in item.by_name}
    if not owners:
        return {}
    stages = find_stages(item)
    decided = {
        item.by_name[name].handle: EVERY_WORKER if owner is None else owner
        for name, owner in by_variable.items() if name in item.by_name
    }  # fmt: skip
    serves = _served(item, stages, decided)
    for variable in item.variables:
        if variable.handle in decided or not _is_updated(stages, variable.handle):
            continue
        found = serves.get(variable.handle) or _computed_from(item, stages, decided, variable.handle)
        if len(found) == 1 and EVERY_WORKER not in found:
            owners[variable.name] = next(iter(found))
    return owners


def _is_updated(stages: Stages, handle: str) -> bool:
    return any(handle in stages.effects[w].writes for w in stages.writes if w in stages.update)


def _served(item: GraphItem, stages: Stages, decided: Mapping[str, int]) -> dict[str, Owners]:
    """For each variable, the owners of the decided ones whose writes it leads to, within what runs once."""
    nodes = {node.name: node for node in item.graph_def.node}
    leads: dict[str, Owners] = {}
    serves: dict[str, Owners] = {}
    for name in sorted(stages.once, key=stages.order.__getitem__, reverse=True):
        effect = stages.effects.get(name)
        mine = leads.get(name, frozenset())
        if effect:
            mine |= {decided[h] for h in effect.writes if h in decided}
            for handle in effect.reads | effect.writes:
                serves[handle] = serves.get(handle, frozenset()) | mine
            for handle in effect.writes - decided.keys():
                mine |= serves.get(handle, frozenset())
        for i in nodes[name].input:
            if not is_control(i):
                source = node_of(i)
                leads[source] = leads.get(source, frozenset()) | mine
    return serves


def _computed_from(item: GraphItem, stages: Stages, decided: Mapping[str, int], handle: str) -> Owners:
    """The owners of the decided variables whose values or gradients the writes of `handle` are computed from."""
    nodes = {node.name: node for node in item.graph_def.node}
    gradient_of = {t: item.by_name[g.variable].handle for g in stages.gradients for t in g.tensors}
    found: set[int] = set()
    front = [w for w in stages.writes if handle in stages.effects[w].writes]
    seen = set(front)
    while front:
        name = front.pop()
        effect = stages.effects.get(name)
        found.update(decided[h] for h in (effect.reads if effect else ()) if h in decided)
        for i in nodes[name].input:
            if is_control(i):
                continue
            source = node_of(i)
            if tensor(i) in gradient_of:
                found.add(decided[gradient_of[tensor(i)]])
            elif source in stages.once and source not in seen:
                seen.add(source)
                front.append(source)
    return frozenset(found)
