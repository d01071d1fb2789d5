"""Keepers: how the owner of each variable keeps it, slots included, and what one update may not mix."""

from __future__ import annotations

from collections.abc import Mapping

import tensorflow as tf

from autodist.errors import StrategyError
from autodist.graph.names import is_control, node_of, tensor
from autodist.graph.placement import EVERY_WORKER, SyncMode, VariablePlacement, listed
from autodist.graph.step import Replication, Step
from autodist.kernels.place.assign_owners import computed_from, find_served
from autodist.kernels.plan import Plan


def find_variable_placements(item: Step, replication: Replication, plan: Plan) -> dict[str, VariablePlacement]:
    """How each owned variable of a replicated step is kept: a slot like the variables that it serves."""
    stages = replication.stages
    asked = {name: plan.variable_placement(name) for name in item.by_name}
    owned = {name: owner for name, owner in item.owners.items() if name in item.by_name}
    free = [k for k in asked.values() if k is not None and k.runs_ahead]
    if not free:
        return {name: VariablePlacement(owner) for name, owner in owned.items()}
    distinct = list(dict.fromkeys(k for k in asked.values() if k is not None))
    mirrored = {g.variable for g in item.gradients}
    decided = {
        item.by_name[name].handle: EVERY_WORKER if variable_placement is None else distinct.index(variable_placement)
        for name, variable_placement in asked.items() if variable_placement is not None or name in mirrored
    }  # fmt: skip
    serves = find_served(item, stages, decided)
    found = {}
    for name, owner in owned.items():
        handle = item.by_name[name].handle
        served = serves.get(handle) or computed_from(item, stages, decided, handle, replication.trained)
        like = [distinct[k] for k in sorted(served) if k != EVERY_WORKER]
        pace = SyncMode.ASYNCHRONOUS if plan.is_asynchronous else SyncMode.SYNCHRONOUS
        found[name] = asked[name] or (
            VariablePlacement(owner, like[0].pace, like[0].staleness) if like else VariablePlacement(owner, pace)
        )
    return found


def runs_freely(replication: Replication, variable_placements: Mapping[str, VariablePlacement]) -> bool:
    """Whether a step trains, and waits for none of the updates that it brings about."""
    trained = replication.trained.values()
    return bool(trained) and all(v in variable_placements and variable_placements[v].runs_ahead for v in trained)


def require_one_keeper_a_write(item: Step, variable_placements: Mapping[str, VariablePlacement]) -> None:
    """Passes a step in which what one operation writes is kept by one worker, in one way.

    Raises:
        StrategyError: names the variables and the operation.
    """
    for name, effect in item.graph_index.effects.items():
        node = item.graph_index.nodes[name]
        written = sorted(item.by_handle[h].name for h in effect.writes)
        places = {(k.owner, k.pace) if (k := variable_placements.get(name)) else None for name in written}
        if len(places) > 1:
            raise StrategyError(
                f"{listed(written)} are written by one operation ({name}, {node.op}), and the strategy gives "
                "them different owners, or one of them to all workers. Give them one owner and the same `sync` and "
                "`staleness` (the PS builder does), or use AllReduce for all of them."
            )


def require_written_by_updates(
    item: Step, replication: Replication, variable_placements: Mapping[str, VariablePlacement]
) -> None:
    """Passes a step that writes no trained variable itself whose updates wait for no other worker.

    What a worker wrote there before it used it would undo the updates that came since it read the variable.

    Raises:
        StrategyError: names the variable and the operation.
    """
    stages = replication.stages
    trained = {item.by_name[name].handle: name for name in replication.trained.values() if name in variable_placements}
    for write in stages.state_writes:
        for handle in sorted(stages.effects[write].writes & trained.keys()):
            name = trained[handle]
            if variable_placements[name].runs_ahead and stages.is_used_after(handle, stages.state_writes):
                raise StrategyError(
                    f"{name} is written by the step before it is used ({write}), and its owner applies updates that "
                    "no worker waits for (sync: false, or staleness): some would be lost. Write it after the update, "
                    "as a constraint of Keras does, or set sync: true and staleness: 0, or use AllReduce for it."
                )


def require_unmixed(item: Step, replication: Replication, variable_placements: Mapping[str, VariablePlacement]) -> None:
    """Passes a step in which no update needs gradients that are combined at different times.

    Raises:
        StrategyError: names the variables and the operation where they meet.
    """
    flow = _Flow(item, replication, variable_placements)
    for name in item.graph_index.order:
        flow.visit(item.graph_index.nodes[name])


class _Flow:
    """From which variables' gradients and values, one for each pace, the nodes of the updates are made."""

    def __init__(
        self, item: Step, replication: Replication, variable_placements: Mapping[str, VariablePlacement]
    ) -> None:
        self._item, self._replication, self._keepers = item, replication, variable_placements
        self._effects = item.graph_index.effects
        self._made_of: dict[str, Mapping[SyncMode, str]] = {}
        self._met_at: dict[str, tuple[str, str]] = {}

    def visit(self, node: tf.compat.v1.NodeDef) -> None:
        """Looks at a node whose inputs have been looked at."""
        if node.name not in self._replication.stages.once:
            self._note(node, self._read_here(node.name))
            return
        found = self._read_here(node.name)
        for i in node.input:
            if is_control(i):
                continue
            source = node_of(i)
            found |= self._made_of.get(source, {})
            if source in self._met_at:
                self._met_at.setdefault(node.name, self._met_at[source])
            if tensor(i) in self._replication.trained:
                variable = self._replication.trained[tensor(i)]
                found[self._pace(variable)] = variable
        self._note(node, found)
        written = self._effects[node.name].writes if node.name in self._effects else frozenset()
        for handle in written:
            self._require_one_pace(node.name, self._item.by_handle[handle].name, found)

    def _note(self, node: tf.compat.v1.NodeDef, found: Mapping[SyncMode, str]) -> None:
        if found:
            self._made_of[node.name] = found
        if len(found) > 1:
            self._met_at.setdefault(node.name, (node.name, node.op))

    def _pace(self, variable: str) -> SyncMode:
        return self._keepers[variable].pace if variable in self._keepers else SyncMode.SYNCHRONOUS

    def _read_here(self, name: str) -> dict[SyncMode, str]:
        """Variables whose value at this moment depends on who has been how fast."""
        reads = self._effects[name].reads if name in self._effects else frozenset()
        names = [self._item.by_handle[h].name for h in sorted(reads)]
        return {self._pace(v): v for v in names if self._pace(v) is not SyncMode.SYNCHRONOUS}

    def _require_one_pace(self, write: str, variable: str, found: Mapping[SyncMode, str]) -> None:
        if len(found) > 1:
            node, op = self._met_at[write]
            told = " and ".join(f"{name} ({pace.value})" for pace, name in sorted(found.items(), key=str))
            raise StrategyError(
                f"the update of {variable} is made from {told}, which meet in {node} ({op}), and these are combined at "
                "different times. Give all of them the same `sync` and `staleness`, or take out of the optimizer what "
                "ties them together (a global norm, say)."
            )
        if variable in self._keepers:
            return
        for pace, source in found.items():
            if pace is SyncMode.STALE or (
                pace is SyncMode.ASYNCHRONOUS and not runs_freely(self._replication, self._keepers)
            ):
                raise StrategyError(
                    f"{variable} is kept by every worker and updated ({write}) from the gradient of {source} "
                    f"({pace.value}), which is not the same on all of them. Make {source} synchronous (sync: true, "
                    "staleness: 0), or use AllReduce for it."
                )
