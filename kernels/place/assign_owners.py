"""Which worker holds a variable or a shard: as the strategy says, and the slots that go with them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, replace
from typing import ClassVar

from autodist.graph.find_stages import find_stages
from autodist.graph.names import is_control, node_of, tensor
from autodist.graph.ops import Trait, having
from autodist.graph.parts import Aggregation, Variable
from autodist.graph.placement import EVERY_WORKER, Partitioning, Placement, shard_name
from autodist.graph.stages import Stages
from autodist.graph.step import Step
from autodist.graph.walks import reach
from autodist.kernels.base import Context, Kernel
from autodist.kernels.normalise.inline_branches import inline_shared_updates
from autodist.kernels.plan import Plan
from autodist.proto import strategy_pb2

_STAND_INS = 1 << 30
"""From here on a number stands for a variable that is cut, and so has no owner of its own."""

_SEVERAL_OPS = having(Trait.CALL | Trait.BRANCH | Trait.LOOP)

Owners = frozenset[int]


@dataclass(frozen=True)
class AssignOwners(Kernel):
    """Notes how each variable is cut, and the owner of every variable or shard that one worker alone holds."""

    name: ClassVar[str] = "assign-owners"

    def apply(self, item: Step, context: Context) -> Step:
        if context.workers == 1:
            return replace(item, owners={}, cuts={})
        placed = _decided(item, context.plan)
        owners = {name: w for name, w in placed.owners.items() if w != EVERY_WORKER}
        return replace(placed, owners=owners, stage_group=context.plan.stage_group)


def find_placements(item: Step, strategy: strategy_pb2.Strategy) -> dict[str, Placement]:
    """Where all variables of a step lie, by name."""
    plan = Plan(strategy)
    placed = replace(_decided(inline_shared_updates(item, plan), plan), stage_group=plan.stage_group)
    return {variable.name: placed.placement(variable.name) for variable in item.variables}


def _decided(item: Step, plan: Plan) -> Step:
    """How a step's variables are cut and who owns them; what `item` says already, from an earlier step, holds.

    What an update keeps beside a variable (a slot) is cut and placed like the variables that it serves: those whose
    update reads it, else those that it is computed from (an average of weights). What serves variables of several
    owners, or one that every worker holds, is held by every worker; so is what serves a variable that is cut and has
    another shape. Where all variables are asynchronous, the owner of the first holds what counts the updates.
    """
    fixed = item.owners.keys() | item.cuts.keys()
    cuts, owners = dict(item.cuts), dict(item.owners)
    for variable in plan.variables:
        if variable in item.by_name and variable not in fixed:
            if variable in plan.cuts:
                cuts[variable] = plan.cuts[variable]
            owners.update(plan.owners_of(variable))
    if (cuts or owners) and not fixed >= item.by_name.keys():
        _place_slots(item, {*plan.variables, *fixed}, cuts, owners)
    if plan.is_asynchronous:
        first = next(iter(plan.owners_of(next(iter(plan.variables))).values()))
        owners.update({name: first for name in find_counters(item) if name not in owners})
    return replace(item, cuts=cuts, owners=owners)


def _place_slots(item: Step, known: Set[str], cuts: dict[str, Partitioning], owners: dict[str, int]) -> None:
    """Adds what follows for variables that are not `known` by themselves."""
    stages = find_stages(item)
    cut_variables = dict(enumerate((name for name in cuts if name in item.by_name), start=_STAND_INS))
    holders = {name: owners.get(name, EVERY_WORKER) for name in known}
    holders.update({name: stand_in for stand_in, name in cut_variables.items()})
    decided = {item.by_name[name].handle: holder for name, holder in holders.items() if name in item.by_name}
    serves = find_served(item, stages, decided)
    read_before = find_served(item, stages, decided, reads_before=True)
    for variable in item.variables:
        handle = variable.handle
        if handle in decided:
            continue
        if _is_updated(stages, handle):
            found = serves.get(handle) or read_before.get(handle) or computed_from(item, stages, decided, handle)
        else:
            found = _written_together(item, stages, decided, handle)
        holder = next(iter(found)) if len(found) == 1 else EVERY_WORKER
        if holder in cut_variables:
            _cut_alike(item, variable, cut_variables[holder], cuts, owners)
        elif holder != EVERY_WORKER:
            owners[variable.name] = holder


def _cut_alike(item: Step, slot: Variable, served: str, cuts: dict[str, Partitioning], owners: dict[str, int]) -> None:
    if slot.shape != item.by_name[served].shape:
        return
    cuts[slot.name] = cuts[served]
    for k in range(len(cuts[served].sizes)):
        if shard_name(served, k) in owners:
            owners[shard_name(slot.name, k)] = owners[shard_name(served, k)]


def _is_updated(stages: Stages, handle: str) -> bool:
    return any(handle in stages.effects[w].writes for w in stages.writes if w in stages.update)


def _written_together(item: Step, stages: Stages, decided: Mapping[str, int], handle: str) -> Owners:
    """The owners of the decided variables that one op writes with it, which runs where all of them lie.

    No gradient reaches such an op where gradients are added up in variables by some runs, and applied by others. What
    a branch or a function writes by several ops may lie at several workers.
    """
    ops = [write for write in stages.writes if item.graph_index.nodes[write].op not in _SEVERAL_OPS]
    written = [stages.effects[write].writes for write in ops]
    return frozenset(decided[h] for handles in written if handle in handles for h in handles if h in decided)


def find_served(
    item: Step, stages: Stages, decided: Mapping[str, int], reads_before: bool = False
) -> dict[str, Owners]:
    """For each variable, the owners of the decided ones whose writes it leads to.

    Args:
        item: the step.
        stages: its stages.
        decided: owners, by handle.
        reads_before: whether it may lead there by what is computed before the updates, for these alone (from the read
            of a slot that is written later), besides what runs once. Once variables are cut, wholes of which all
            shards are parts may be computed there.
    """
    nodes = item.graph_index.nodes
    leads: dict[str, Owners] = {}
    serves: dict[str, Owners] = {}
    for name in _of_updates(item, stages) if reads_before else _backwards(stages):
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


def _backwards(stages: Stages) -> list[str]:
    """What runs once, each node before all that it needs."""
    return sorted(stages.once, key=stages.order.__getitem__, reverse=True)


def _of_updates(item: Step, stages: Stages) -> list[str]:
    """What runs once, and what is computed for that alone, in that order, too."""
    found: dict[str, None] = {}
    for name in reversed(item.graph_index.order):
        readers = [c for c in item.graph_index.consumers[name] if name in item.graph_index.data[c]]
        if name in stages.once or (readers and all(reader in found for reader in readers)):
            found[name] = None
    return list(found)


def computed_from(
    item: Step,
    stages: Stages,
    decided: Mapping[str, int],
    handle: str,
    gradients: Mapping[str, str] | None = None,
) -> Owners:
    """The owners of the decided variables whose values or gradients the writes of `handle` are computed from.

    Args:
        gradients: the variable that each tensor which the updates read is the gradient of; by default as captured.
    """
    nodes = item.graph_index.nodes
    if gradients is None:
        gradients = {t: g.variable for g in stages.gradients for t in g.tensors}
    gradient_of = {t: item.by_name[variable].handle for t, variable in gradients.items()}
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


Nodes = Mapping[str, list[tuple[str, str]]]
"""By a node's name, the nodes and tensors that it has data from."""


def find_counters(item: Step) -> list[str]:
    """Names of the variables that every step writes alike, whatever its batch, and that belong to the updates.

    These read them (Adam's number of steps), or the script has declared that one replica's write is enough, as Keras
    does of an optimizer's `iterations`.
    """
    stages = find_stages(item)
    nodes: Nodes = {
        n.name: [(node_of(i), tensor(i)) for i in n.input if not is_control(i)] for n in item.graph_def.node
    }
    read = _read_by_updates(stages, nodes)
    written = _written_alike(item, stages, nodes)
    return [
        v.name for v in item.variables
        if v.handle in written and (v.handle in read or v.aggregation is Aggregation.ONLY_FIRST_REPLICA)
    ]  # fmt: skip


def _read_by_updates(stages: Stages, nodes: Nodes) -> set[str]:
    """Handles of what the updates read, beside gradients."""
    gradients = {t for g in stages.gradients for t in g.tensors}
    writes = [w for w in stages.writes if w in stages.update]
    found = _data_ancestors(nodes, writes, gradients)
    return {h for name in found if name in stages.effects for h in stages.effects[name].reads}


def _written_alike(item: Step, stages: Stages, nodes: Nodes) -> set[str]:
    """Handles of what the compute part writes with values that no batch and no random draw reaches."""
    batch = {node_of(name) for name, axis in item.inputs.items() if axis is not None}
    batch |= {node.name for node in item.graph_index.having(Trait.SEEDED)}
    by_handle: dict[str, list[str]] = {}
    for write in stages.state_writes:
        for handle in stages.effects[write].writes:
            by_handle.setdefault(handle, []).append(write)
    seeds = {v.handle for v in item.variables if v.is_seed}
    return {h for h, writes in by_handle.items() if h not in seeds and not batch & _data_ancestors(nodes, writes)}


def _data_ancestors(nodes: Nodes, roots: Iterable[str], without: Iterable[str] = ()) -> set[str]:
    """The roots and all that they are computed from, the tensors `without` left aside."""
    left = set(without)
    return reach(roots, lambda name: [source for source, made in nodes[name] if made not in left])
