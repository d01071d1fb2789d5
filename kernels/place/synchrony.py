"""The synchronization of variables and slots, and checks that updates do not mix modes."""

from __future__ import annotations

from collections.abc import Mapping

import tensorflow as tf

from autodist.errors import StrategyError
from autodist.graph.names import is_control, node_of, tensor
from autodist.graph.step import ReplicatedStep
from autodist.kernels.place.slots import ServedVariables
from autodist.kernels.plan import Plan
from autodist.placement.partitioning import listed
from autodist.placement.synchrony import Synchrony, SyncMode


def find_synchrony(step: ReplicatedStep, plan: Plan) -> dict[str, Synchrony]:
    """Returns the synchronization of each owned variable, and of those with local steps.

    That of a slot is that of the variables that it serves.
    """
    requested = {name: plan.synchrony(name) for name in step.by_name}
    owned = [name for name in step.owners if name in step.by_name]
    if not any(one.runs_ahead for one in requested.values() if one is not None):
        return dict.fromkeys(owned, Synchrony())
    trained = {g.variable for g in step.gradients}
    known = [step.by_name[name].handle for name, one in requested.items() if one is not None or name in trained]
    served = ServedVariables(step, step.stages, known, step.trained, follows_early_reads=False)
    otherwise = Synchrony(SyncMode.ASYNCHRONOUS if plan.is_asynchronous else SyncMode.SYNCHRONOUS)
    found = {}
    for name in owned:
        handles = served.of(step.by_name[name].handle)
        like = (one for other, one in requested.items() if one is not None and step.by_name[other].handle in handles)
        found[name] = requested[name] or next(like, otherwise)
    return found | _with_local_steps(step, plan, served)


def _with_local_steps(step: ReplicatedStep, plan: Plan, served: ServedVariables) -> dict[str, Synchrony]:
    """Returns the synchronization of the variables with local steps, and of the slots that serve no others."""
    local = {step.by_name[name].handle for name in plan.local_steps if name in step.by_name}
    if not local:
        return {}
    slots = {
        v.handle for v in step.variables if v.name not in step.owners and (h := served.of(v.handle)) and h <= local
    }
    return {v.name: Synchrony(SyncMode.LOCAL) for v in step.variables if v.handle in local | slots}


def runs_freely(step: ReplicatedStep, synchrony_of: Mapping[str, Synchrony]) -> bool:
    """Returns True if a step trains and waits for none of its updates."""
    trained = step.trained.values()
    return bool(trained) and all(v in synchrony_of and synchrony_of[v].runs_ahead for v in trained)


def require_one_owner_per_write(step: ReplicatedStep, synchrony_of: Mapping[str, Synchrony]) -> None:
    """Checks that each operation writes variables of one owner and one mode.

    Raises:
        StrategyError: names the variables and the operation.
    """
    for name, effect in step.graph_index.effects.items():
        node = step.graph_index.nodes[name]
        written = sorted(step.by_handle[h].name for h in effect.writes)
        places = {(step.owners.get(name), k.mode) if (k := synchrony_of.get(name)) else None for name in written}
        if len(places) > 1:
            raise StrategyError(
                f"{listed(written)} are written by one operation ({name}, {node.op}), but the strategy gives "
                "them different owners, or one of them to all workers, or local steps to some. Give them one owner and "
                "the same `sync` and `staleness` (the PS builder does), or use AllReduce for all of them, with the "
                "same `local_steps`."
            )


def require_written_by_updates(step: ReplicatedStep, synchrony_of: Mapping[str, Synchrony]) -> None:
    """Checks that a step does not itself write a trained variable whose updates run ahead.

    A worker's write before the variable is used would undo the updates that arrived since the worker read it.

    Raises:
        StrategyError: names the variable and the operation.
    """
    stages = step.stages
    trained = {step.by_name[name].handle: name for name in step.trained.values() if name in synchrony_of}
    for write in stages.state_writes:
        for handle in sorted(stages.effects[write].writes & trained.keys()):
            name = trained[handle]
            is_owned = synchrony_of[name].mode is not SyncMode.LOCAL
            if is_owned and synchrony_of[name].runs_ahead and stages.is_used_after(handle, stages.state_writes):
                raise StrategyError(
                    f"{name} is written by the step before it is used ({write}), and its owner applies updates that "
                    "no worker waits for (sync: false, or staleness): some would be lost. Write it after the update, "
                    "as a Keras constraint does, or set sync: true and staleness: 0, or use AllReduce for it."
                )


def require_unmixed(step: ReplicatedStep, synchrony_of: Mapping[str, Synchrony]) -> None:
    """Checks that no update depends on gradients that are combined at different times.

    Raises:
        StrategyError: names the variables and the operation that combines them.
    """
    flow = _Flow(step, synchrony_of)
    for name in step.graph_index.order:
        flow.visit(step.graph_index.nodes[name])


class _Flow:
    """The variables, one per mode, whose gradients and values the nodes of the updates depend on."""

    def __init__(self, step: ReplicatedStep, synchrony_of: Mapping[str, Synchrony]) -> None:
        self._step, self._synchrony_of = step, synchrony_of
        self._effects = step.graph_index.effects
        self._depends_on: dict[str, Mapping[SyncMode, str]] = {}
        self._combined_at: dict[str, tuple[str, str]] = {}

    def visit(self, node: tf.compat.v1.NodeDef) -> None:
        """Processes a node after its inputs."""
        if node.name not in self._step.stages.once:
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
            if tensor(i) in self._step.trained:
                variable = self._step.trained[tensor(i)]
                sources[self._mode(variable)] = variable
        self._record(node, sources)
        written = self._effects[node.name].writes if node.name in self._effects else frozenset()
        for handle in written:
            self._require_one_mode(node.name, self._step.by_handle[handle].name, sources)

    def _record(self, node: tf.compat.v1.NodeDef, sources: Mapping[SyncMode, str]) -> None:
        if sources:
            self._depends_on[node.name] = sources
        if len(sources) > 1:
            self._combined_at.setdefault(node.name, (node.name, node.op))

    def _mode(self, variable: str) -> SyncMode:
        return self._synchrony_of[variable].mode if variable in self._synchrony_of else SyncMode.SYNCHRONOUS

    def _read_here(self, name: str) -> dict[SyncMode, str]:
        """Returns the variables read by a node whose current value depends on the workers' relative speed, by mode."""
        reads = self._effects[name].reads if name in self._effects else frozenset()
        names = [self._step.by_handle[h].name for h in sorted(reads)]
        return {self._mode(v): v for v in names if self._mode(v) is not SyncMode.SYNCHRONOUS}

    def _require_one_mode(self, write: str, variable: str, sources: Mapping[SyncMode, str]) -> None:
        if len(sources) > 1:
            node, op = self._combined_at[write]
            mixed = " and ".join(f"{name} ({mode.value})" for mode, name in sorted(sources.items(), key=str))
            raise StrategyError(
                f"the update of {variable} depends on {mixed}, which meet in {node} ({op}), and these are combined at "
                "different times. Give all of them the same `sync`, `staleness` and `local_steps`, or remove from the "
                "optimizer the operation that combines them (a global norm, for example)."
            )
        if variable in self._synchrony_of:
            return
        for mode, source in sources.items():
            if mode is SyncMode.STALE or (mode.is_alone and not runs_freely(self._step, self._synchrony_of)):
                raise StrategyError(
                    f"{variable} is held by every worker and updated ({write}) from the gradient of {source} "
                    f"({mode.value}), which differs between workers. Make {source} synchronous (sync: true, "
                    "staleness: 0), or use AllReduce without local steps for it."
                )
