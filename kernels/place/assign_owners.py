"""Assignment of owners to variables and shards by the strategy, and to slots by the variables that they serve."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from typing import ClassVar

from autodist.graph.find_stages import find_stages
from autodist.graph.names import is_control, node_of, tensor
from autodist.graph.ops import Trait, having
from autodist.graph.parts import Aggregation, Variable
from autodist.graph.placement import EVERY_WORKER, Partitioning, Placement, shard_name
from autodist.graph.stages import Stages
from autodist.graph.step import CapturedStep, PlacedStep, Step
from autodist.graph.walks import reach
from autodist.kernels.base import Context, Kernel
from autodist.kernels.normalise.inline_branches import inline_shared_updates
from autodist.kernels.plan import Plan
from autodist.proto import strategy_pb2

_PARTITIONED = 1 << 30
"""Numbers from here on stand for a partitioned variable, which has no single owner."""

_SEVERAL_OPS = having(Trait.CALL | Trait.BRANCH | Trait.LOOP)

Owners = frozenset[int]


@dataclass(frozen=True)
class AssignOwners(Kernel[CapturedStep, PlacedStep]):
    """Sets the partitioning of each variable, and the owner of each variable or shard that only one worker holds."""

    name: ClassVar[str] = "assign-owners"

    def apply(self, step: CapturedStep, context: Context) -> PlacedStep:
        if context.workers == 1:
            return PlacedStep.of(step)
        cuts, owners = _place(step, context.plan)
        owners = {name: w for name, w in owners.items() if w != EVERY_WORKER}
        return PlacedStep.of(step, cuts=cuts, owners=owners, stage_group=context.plan.stage_group)


def find_placements(step: CapturedStep, strategy: strategy_pb2.Strategy) -> dict[str, Placement]:
    """Returns the placements of all variables of a step, by name."""
    plan = Plan(strategy)
    inlined = inline_shared_updates(step, plan)
    cuts, owners = _place(inlined, plan)
    placed = PlacedStep.of(inlined, cuts=cuts, owners=owners, stage_group=plan.stage_group)
    return {variable.name: placed.placement(variable.name) for variable in step.variables}


def _place(step: CapturedStep, plan: Plan) -> tuple[dict[str, Partitioning], dict[str, int]]:
    """Returns the partitionings and owners of the variables; those from an earlier step are kept.

    A slot is partitioned and placed like the variables that it serves. These are the variables whose update reads it,
    or else those that it is computed from (for an average of weights). A slot that serves variables of several owners,
    or a variable that every worker holds, is held by every worker. So is a slot of a partitioned variable with another
    shape. If all variables are asynchronous, the owner of the first one owns the update counters.
    """
    cuts = {name: placement.cut for name, placement in step.placements.items() if placement.cut is not None}
    owners: dict[str, int] = {}
    for name, placement in step.placements.items():
        names = [name] if placement.cut is None else [shard_name(name, k) for k in range(len(placement.owners))]
        owners.update(zip(names, placement.owners, strict=True))
    fixed = owners.keys() | cuts.keys()
    for variable in plan.variables:
        if variable in step.by_name and variable not in fixed:
            if variable in plan.cuts:
                cuts[variable] = plan.cuts[variable]
            owners.update(plan.owners_of(variable))
    if (cuts or owners) and not fixed >= step.by_name.keys():
        _place_slots(step, {*plan.variables, *fixed}, cuts, owners)
    if plan.is_asynchronous:
        first = next(iter(plan.owners_of(next(iter(plan.variables))).values()))
        owners.update({name: first for name in find_counters(step) if name not in owners})
    return cuts, owners


def _place_slots(step: CapturedStep, known: Set[str], cuts: dict[str, Partitioning], owners: dict[str, int]) -> None:
    """Adds the placements of variables that are not `known`, by the variables that they serve."""
    stages = find_stages(step)
    cut_variables = dict(enumerate((name for name in cuts if name in step.by_name), start=_PARTITIONED))
    holders = {name: owners.get(name, EVERY_WORKER) for name in known}
    holders.update({name: stand_in for stand_in, name in cut_variables.items()})
    decided = {step.by_name[name].handle: holder for name, holder in holders.items() if name in step.by_name}
    serves = find_served_owners(step, stages, decided)
    read_before = find_served_owners(step, stages, decided, reads_before=True)
    for variable in step.variables:
        handle = variable.handle
        if handle in decided:
            continue
        if _is_updated(stages, handle):
            served = serves.get(handle) or read_before.get(handle) or computed_from(step, stages, decided, handle)
        else:
            served = _written_together(step, stages, decided, handle)
        owner = next(iter(served)) if len(served) == 1 else EVERY_WORKER
        if owner in cut_variables:
            _partition_like(step, variable, cut_variables[owner], cuts, owners)
        elif owner != EVERY_WORKER:
            owners[variable.name] = owner


def _partition_like(
    step: CapturedStep, slot: Variable, served: str, cuts: dict[str, Partitioning], owners: dict[str, int]
) -> None:
    if slot.shape != step.by_name[served].shape:
        return
    cuts[slot.name] = cuts[served]
    for k in range(len(cuts[served].sizes)):
        if shard_name(served, k) in owners:
            owners[shard_name(slot.name, k)] = owners[shard_name(served, k)]


def _is_updated(stages: Stages, handle: str) -> bool:
    return any(handle in stages.effects[w].writes for w in stages.writes if w in stages.update)


def _written_together(step: Step, stages: Stages, decided: Mapping[str, int], handle: str) -> Owners:
    """Returns the owners of the decided variables that one op writes together with `handle`; it runs where they are.

    No gradient reaches such an op if some runs accumulate gradients in variables and others apply them. A branch or a
    function with several ops may write variables of several workers.
    """
    ops = [write for write in stages.writes if step.graph_index.nodes[write].op not in _SEVERAL_OPS]
    written = [stages.effects[write].writes for write in ops]
    return frozenset(decided[h] for handles in written if handle in handles for h in handles if h in decided)


def find_served_owners(
    step: Step, stages: Stages, decided: Mapping[str, int], reads_before: bool = False
) -> dict[str, Owners]:
    """Returns, for each variable, the owners of the decided variables whose writes depend on it.

    Args:
        step: the step. stages: the stages of the step. decided: owners, by handle. reads_before: True to also follow
            nodes that are computed only for the part that runs once (from an early read of a slot that is written
            later). After partitioning, such nodes may compute concatenations of all shards.
    """
    nodes = step.graph_index.nodes
    leads: dict[str, Owners] = {}
    serves: dict[str, Owners] = {}
    for name in _of_updates(step, stages) if reads_before else _backwards(stages):
        effect = stages.effects.get(name)
        reached = leads.get(name, frozenset())
        if effect:
            reached |= {decided[h] for h in effect.writes if h in decided}
            for handle in effect.reads | effect.writes:
                serves[handle] = serves.get(handle, frozenset()) | reached
            for handle in effect.writes - decided.keys():
                reached |= serves.get(handle, frozenset())
        for i in nodes[name].input:
            if not is_control(i):
                source = node_of(i)
                leads[source] = leads.get(source, frozenset()) | reached
    return serves


def _backwards(stages: Stages) -> list[str]:
    """Returns the nodes that run once, in reverse topological order."""
    return sorted(stages.once, key=stages.order.__getitem__, reverse=True)


def _of_updates(step: Step, stages: Stages) -> list[str]:
    """Returns the nodes that run once and those computed only for them, in reverse topological order."""
    found: dict[str, None] = {}
    for name in reversed(step.graph_index.order):
        readers = [c for c in step.graph_index.consumers[name] if name in step.graph_index.data[c]]
        if name in stages.once or (readers and all(reader in found for reader in readers)):
            found[name] = None
    return list(found)


def computed_from(
    step: Step,
    stages: Stages,
    decided: Mapping[str, int],
    handle: str,
    gradients: Mapping[str, str] | None = None,
) -> Owners:
    """Returns the owners of the decided variables whose values or gradients the writes of `handle` depend on.

    Args:
        gradients: maps tensors that the updates read to the variable that they are the gradient of; by default as
            captured.
    """
    nodes = step.graph_index.nodes
    if gradients is None:
        gradients = {t: g.variable for g in stages.gradients for t in g.tensors}
    gradient_of = {t: step.by_name[variable].handle for t, variable in gradients.items()}
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
"""By node, the nodes and tensors of its data inputs."""


def find_counters(step: CapturedStep) -> list[str]:
    """Returns the names of update counters, which every step writes with values that do not depend on the batch.

    The updates read them (Adam's number of steps), or the script declares that one replica's write is enough. Keras
    declares this for an optimizer's `iterations`.
    """
    stages = find_stages(step)
    nodes: Nodes = {
        n.name: [(node_of(i), tensor(i)) for i in n.input if not is_control(i)] for n in step.graph_def.node
    }
    read = _read_by_updates(stages, nodes)
    written = _written_alike(step, stages, nodes)
    return [
        v.name for v in step.variables
        if v.handle in written and (v.handle in read or v.aggregation is Aggregation.ONLY_FIRST_REPLICA)
    ]  # fmt: skip


def _read_by_updates(stages: Stages, nodes: Nodes) -> set[str]:
    """Returns the handles of variables, besides gradients, that the updates read."""
    gradients = {t for g in stages.gradients for t in g.tensors}
    writes = [w for w in stages.writes if w in stages.update]
    found = _data_ancestors(nodes, writes, gradients)
    return {h for name in found if name in stages.effects for h in stages.effects[name].reads}


def _written_alike(step: CapturedStep, stages: Stages, nodes: Nodes) -> set[str]:
    """Returns the handles that the compute part writes with values that depend on no batch and no random number."""
    batch = {node_of(name) for name, axis in step.inputs.items() if axis is not None}
    batch |= {node.name for node in step.graph_index.having(Trait.SEEDED)}
    by_handle: dict[str, list[str]] = {}
    for write in stages.state_writes:
        for handle in stages.effects[write].writes:
            by_handle.setdefault(handle, []).append(write)
    seeds = {v.handle for v in step.variables if v.is_seed}
    return {h for h, writes in by_handle.items() if h not in seeds and not batch & _data_ancestors(nodes, writes)}


def _data_ancestors(nodes: Nodes, roots: Iterable[str], without: Iterable[str] = ()) -> set[str]:
    """Returns the roots and their data ancestors, without following the tensors `without`."""
    left = set(without)
    return reach(roots, lambda name: [source for source, made in nodes[name] if made not in left])
