"""Cached copies: each worker caches a copy of an owned variable for its replicas, refreshed once per step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from autodist.errors import StrategyError
from autodist.graph.names import is_control, node_of, tensor
from autodist.graph.parts import Variable
from autodist.graph.step import ReplicatedStep
from autodist.graph.step_editor import StepEditor
from autodist.graph.walks import reach
from autodist.kernels.base import Context, Kernel
from autodist.kernels.place.copies import add_copy
from autodist.kernels.plan import CACHED_COPY
from autodist.placement.holder import Copy
from autodist.placement.synchrony import SyncMode


def copy_of(handle: str) -> str:
    """Returns the name of the node for the cached copy of a variable, given the node of the variable's handle."""
    return f"autodist/cached_copy/{handle}"


class CachedReads:
    """The reads of a step that use the cached copy of a variable, the same on all workers that have replicas."""

    def __init__(self, step: ReplicatedStep, context: Context) -> None:
        assert step.order is not None, "set by SetSyncMode"
        self._plan, self._order = context.plan, step.order
        roots = [node for message in self._order.messages for node in self._order.sources[message]]
        roots += [name for name in map(node_of, step.outputs) if name in self._order.position]
        # Control inputs count: a loop waits in this way until its copy of a partitioned variable is refreshed.
        self.compute = reach(roots, self._order.graph_index.sources.__getitem__) - step.stages.once

    def of(self, variable: Variable) -> list[str]:
        """Returns the reads of the compute part before the step's own update, if the strategy gives a copy."""
        if not self._plan.has_cached_copy(variable.name):
            return []
        graph_index, handle = self._order.graph_index, variable.handle
        effects = graph_index.effects
        late = reach((name for name, e in effects.items() if handle in e.writes), graph_index.consumers.__getitem__)
        # A v1 loop forwards the handle and reads an earlier copy.
        return [
            name for name, effect in effects.items()
            if handle in effect.reads and not effect.writes and name in self.compute and name not in late
            and handle in graph_index.data[name]
        ]  # fmt: skip


@dataclass(frozen=True)
class ReadCachedCopies(Kernel[ReplicatedStep, ReplicatedStep]):
    """Makes replicas read a copy on their own worker, which is refreshed after the variable's update.

    The value is then sent once per step, and whole: for a table, all rows; with a compressor, encoded. The owner sends
    it with the signal that the update has finished. For a synchronous variable, the step refreshes the copy
    (`ParameterServers`), and the owner reads the variable itself, unless the copies are rounded. For a stale one, a
    background program refreshes it at any time (`StaleServers`), so the replicas of a worker share one read. For an
    asynchronous one, each worker fetches the value. The update, and reads after the step's own update, still read the
    variable.

        read(v) → f → g → update(v)     becomes     read(copy) → f → g → update(v) → v → assign(copy)
    """

    name: ClassVar[str] = "read-cached-copies"
    after: ClassVar[Mapping[str, str]] = {
        "set-sync-mode": "it sets the synchrony of owned variables",
    }

    def apply(self, step: ReplicatedStep, context: Context) -> ReplicatedStep:
        plan = context.plan
        holders = {name: holder.with_copies(name, plan.cached_copies) for name, holder in step.holders.items()}
        step = replace(step, holders=holders)
        found = ((name, step.slices[name].copy(CACHED_COPY)) for name in step.owners if name in step.synchrony_of)
        copies = {name: copy for name, copy in found if copy is not None}
        if not (copies and context.computes):
            return step
        work = _CachedCopies(step, context)
        for name, copy in copies.items():
            if copy.is_held_by(context.worker, step.owners[name]):
                work.use_cached_copy(step.by_name[name], copy, plan.has_cached_copy(name))
        return work.editor.to_step()


class _CachedCopies:
    """The edited step."""

    def __init__(self, step: ReplicatedStep, context: Context) -> None:
        self._step, self._context, self._stages = step, context, step.stages
        self.editor = StepEditor(step)
        self._effects = step.graph_index.effects
        self._shared_reads: dict[tuple[str, ...], str] = {}
        self._cached_reads = CachedReads(step, context)

    def use_cached_copy(self, variable: Variable, copy: Copy, is_read: bool) -> None:
        """Makes the compute part read a variable's cached copy, and adds what refreshes it.

        Args:
            variable: the variable.
            copy: its cached copy.
            is_read: False if another step's strategy gave it the copy. This step then refreshes it if it writes the
                variable, but reads the variable, since updates of that other step may not have reached the copy.
        """
        handle = variable.handle
        writes = [name for name, effect in self._effects.items() if handle in effect.writes]
        is_sent = self._step.synchrony_of[variable.name].mode is not SyncMode.ASYNCHRONOUS
        if not (writes or (is_read and is_sent)):
            return
        device = self._context.home(self._context.worker, variable.dtype)
        cached_copy = add_copy(self.editor, variable, copy_of(handle), CACHED_COPY, device)
        reads = self._cached_reads.of(variable)
        if copy.encoding:
            self._require_exact_updates(variable, reads)
        is_same = not copy.is_at_owner
        reading = [made for name in reads for made in self._read_instead(name, variable, cached_copy, is_same)]
        if not is_sent:
            self._refresh(variable, cached_copy, writes, reading)

    def _require_exact_updates(self, variable: Variable, reads: Sequence[str]) -> None:
        """Checks that no update uses a value of the compute part that comes from a rounded copy, besides gradients.

        An update may read the variable itself. If it used the rounded value, small changes would be lost.

        Raises:
            StrategyError: there is such an update.
        """
        index, once = self._step.graph_index, self._stages.once
        ends = {node_of(t) for pending in self._step.reductions for t in (*pending.local, *pending.result)}
        derived = reach(reads, lambda name: () if name in ends else set(index.readers(name)) - once) - ends
        shared = next((name for name in sorted(derived) if once.intersection(index.readers(name))), None)
        if shared is not None:
            raise StrategyError(
                f"{variable.name} has a value_compressor, and an update uses {shared}, as the loss does, which would "
                "be rounded. Read the variable again for the update, or give it the value_compressor NONE."
            )

    def _read_instead(self, name: str, variable: Variable, cached_copy: str, is_same: bool) -> list[str]:
        """Replaces a read by a read of the cached copy; returns the node that reads it.

        Updates still read the variable unless the copy always has the same value (`is_same`).
        """
        if self.editor[name].op != "ReadVariableOp":
            self.editor.rewire(tensor(variable.handle), cached_copy, [name])
            return [name]
        readers = self.editor.readers(name)
        if not is_same:
            readers = [c for c in readers if c in self._cached_reads.compute]
        if not readers and not (is_same and tensor(name) in self.editor.outputs):
            return []
        waits = [i for i in self.editor[name].input if is_control(i)]
        read = self._read(f"autodist/cached_copy/{name}", variable, cached_copy, waits)
        self.editor.rewire(tensor(name), read, None if is_same else readers)
        self._drop_unread(name)
        return [read]

    def _read(self, name: str, variable: Variable, cached_copy: str, waits: Sequence[str]) -> str:
        """Adds a read of a cached copy; if the copy may change at any time, equal reads are one."""
        inputs = (cached_copy, *waits)
        if self._step.synchrony_of[variable.name].mode is SyncMode.STALE and inputs in self._shared_reads:
            return self._shared_reads[inputs]
        self._shared_reads[inputs] = self.editor.add_op("ReadVariableOp", name, inputs, variable.dtype)
        return self._shared_reads[inputs]

    def _drop_unread(self, name: str) -> None:
        """Removes a read whose value nothing uses; otherwise it would still run for its control dependencies."""
        returned = {*map(node_of, self.editor.outputs), *self._step.targets}
        if name in returned or self.editor.readers(name):
            return
        self.editor.replace_control(name, [node_of(i) for i in self.editor[name].input if is_control(i)])
        self.editor.remove([name])

    def _refresh(self, variable: Variable, cached_copy: str, writes: Sequence[str], reading: Sequence[str]) -> None:
        waits = [f"^{w}" for w in writes]
        fresh = self.editor.add_op("ReadVariableOp", f"{cached_copy}/fresh", [variable.handle, *waits], variable.dtype)
        inputs = [cached_copy, fresh, *(f"^{r}" for r in reading)]
        self.editor.run([self.editor.add_op("AssignVariableOp", f"{cached_copy}/refresh", inputs, variable.dtype)])
