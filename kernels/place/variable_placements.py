"""Placements and synchronization modes of owned variables and slots, and checks that updates do not mix them."""

from __future__ import annotations

from collections.abc import Mapping

import tensorflow as tf

from autodist.errors import StrategyError
from autodist.graph.names import is_control, node_of, tensor
from autodist.graph.placement import EVERY_WORKER, SyncMode, VariablePlacement, listed
from autodist.graph.step import ReplicatedStep
from autodist.kernels.place.assign_owners import computed_from, find_served_owners
from autodist.kernels.plan import Plan


def find_variable_placements(step: ReplicatedStep, plan: Plan) -> dict[str, VariablePlacement]:
    """Returns the placement of each owned variable of a step; a slot is placed like the variables that it serves."""
    stages = step.stages
    requested = {name: plan.variable_placement(name) for name in step.by_name}
    owned = {name: owner for name, owner in step.owners.items() if name in step.by_name}
    free = [k for k in requested.values() if k is not None and k.runs_ahead]
    if not free:
        return {name: VariablePlacement(owner) for name, owner in owned.items()}
    distinct = list(dict.fromkeys(k for k in requested.values() if k is not None))
    mirrored = {g.variable for g in step.gradients}
    decided = {
        step.by_name[name].handle: EVERY_WORKER if variable_placement is None else distinct.index(variable_placement)
        for name, variable_placement in requested.items() if variable_placement is not None or name in mirrored
    }  # fmt: skip
    serves = find_served_owners(step, stages, decided)
    found = {}
    for name, owner in owned.items():
        handle = step.by_name[name].handle
        served = serves.get(handle) or computed_from(step, stages, decided, handle, step.trained)
        like = [distinct[k] for k in sorted(served) if k != EVERY_WORKER]
        pace = SyncMode.ASYNCHRONOUS if plan.is_asynchronous else SyncMode.SYNCHRONOUS
        found[name] = requested[name] or (
            VariablePlacement(owner, like[0].pace, like[0].staleness) if like else VariablePlacement(owner, pace)
        )
    return found


def runs_freely(step: ReplicatedStep, variable_placements: Mapping[str, VariablePlacement]) -> bool:
    """Returns True if a step trains and waits for none of its updates."""
    trained = step.trained.values()
    return bool(trained) and all(v in variable_placements and variable_placements[v].runs_ahead for v in trained)


def require_one_owner_per_write(step: ReplicatedStep, variable_placements: Mapping[str, VariablePlacement]) -> None:
    """Checks that each operation writes variables of one owner and one mode.

    Raises:
        StrategyError: names the variables and the operation.
    """
    for name, effect in step.graph_index.effects.items():
        node = step.graph_index.nodes[name]
        written = sorted(step.by_handle[h].name for h in effect.writes)
        places = {(k.owner, k.pace) if (k := variable_placements.get(name)) else None for name in written}
        if len(places) > 1:
            raise StrategyError(
                f"{listed(written)} are written by one operation ({name}, {node.op}), but the strategy gives "
                "them different owners, or one of them to all workers. Give them one owner and the same `sync` and "
                "`staleness` (the PS builder does), or use AllReduce for all of them."
            )


def require_written_by_updates(step: ReplicatedStep, variable_placements: Mapping[str, VariablePlacement]) -> None:
    """Checks that a step does not itself write a trained variable whose updates run ahead.

    A worker's write before the variable is used would undo the updates that arrived since the worker read it.

    Raises:
        StrategyError: names the variable and the operation.
    """
    stages = step.stages
    trained = {step.by_name[name].handle: name for name in step.trained.values() if name in variable_placements}
    for write in stages.state_writes:
        for handle in sorted(stages.effects[write].writes & trained.keys()):
            name = trained[handle]
            if variable_placements[name].runs_ahead and stages.is_used_after(handle, stages.state_writes):
                raise StrategyError(
                    f"{name} is written by the step before it is used ({write}), and its owner applies updates that "
                    "no worker waits for (sync: false, or staleness): some would be lost. Write it after the update, "
                    "as a Keras constraint does, or set sync: true and staleness: 0, or use AllReduce for it."
                )


def require_unmixed(step: ReplicatedStep, variable_placements: Mapping[str, VariablePlacement]) -> None:
    """Checks that no update depends on gradients that are combined at different times.

    Raises:
        StrategyError: names the variables and the operation that combines them.
    """
    flow = _Flow(step, variable_placements)
    for name in step.graph_index.order:
        flow.visit(step.graph_index.nodes[name])


class _Flow:
    """The variables, one per mode, whose gradients and values the nodes of the updates depend on."""

    def __init__(self, step: ReplicatedStep, variable_placements: Mapping[str, VariablePlacement]) -> None:
        self._item, self._placements = step, variable_placements
        self._effects = step.graph_index.effects
        self._depends_on: dict[str, Mapping[SyncMode, str]] = {}
        self._combined_at: dict[str, tuple[str, str]] = {}

    def visit(self, node: tf.compat.v1.NodeDef) -> None:
        """Processes a node after its inputs."""
        if node.name not in self._item.stages.once:
            self._record(node, self._read_here(node.name))
            return
        sources = self._read_here(node.name)
        for i in node.input:
            if is_control(i):
                continue
            source = node_of(i)
            sources |= self._depends_on.get(source, {})
            if source in self._combined_at:
                self._combined_at.setdefault(node.name, self._combined_at[source])
            if tensor(i) in self._item.trained:
                variable = self._item.trained[tensor(i)]
                sources[self._pace(variable)] = variable
        self._record(node, sources)
        written = self._effects[node.name].writes if node.name in self._effects else frozenset()
        for handle in written:
            self._require_one_pace(node.name, self._item.by_handle[handle].name, sources)

    def _record(self, node: tf.compat.v1.NodeDef, sources: Mapping[SyncMode, str]) -> None:
        if sources:
            self._depends_on[node.name] = sources
        if len(sources) > 1:
            self._combined_at.setdefault(node.name, (node.name, node.op))

    def _pace(self, variable: str) -> SyncMode:
        return self._placements[variable].pace if variable in self._placements else SyncMode.SYNCHRONOUS

    def _read_here(self, name: str) -> dict[SyncMode, str]:
        """Returns the variables read by a node whose current value depends on the workers' relative speed, by mode."""
        reads = self._effects[name].reads if name in self._effects else frozenset()
        names = [self._item.by_handle[h].name for h in sorted(reads)]
        return {self._pace(v): v for v in names if self._pace(v) is not SyncMode.SYNCHRONOUS}

    def _require_one_pace(self, write: str, variable: str, sources: Mapping[SyncMode, str]) -> None:
        if len(sources) > 1:
            node, op = self._combined_at[write]
            mixed = " and ".join(f"{name} ({pace.value})" for pace, name in sorted(sources.items(), key=str))
            raise StrategyError(
                f"the update of {variable} depends on {mixed}, which meet in {node} ({op}), and these are combined at "
                "different times. Give all of them the same `sync` and `staleness`, or remove from the optimizer the "
                "operation that combines them (a global norm, for example)."
            )
        if variable in self._placements:
            return
        for pace, source in sources.items():
            if pace is SyncMode.STALE or (
                pace is SyncMode.ASYNCHRONOUS and not runs_freely(self._item, self._placements)
            ):
                raise StrategyError(
                    f"{variable} is held by every worker and updated ({write}) from the gradient of {source} "
                    f"({pace.value}), which differs between workers. Make {source} synchronous (sync: true, "
                    "staleness: 0), or use AllReduce for it."
                )
