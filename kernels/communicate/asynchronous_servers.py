"""Asynchronous parameter servers: each worker applies its own gradients without waiting for other workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import tensorflow as tf

from autodist.graph.devices import device_of
from autodist.graph.effects import Effect
from autodist.graph.names import is_control, node_of
from autodist.graph.parts import PendingReduction
from autodist.graph.step import ReplicatedStep, Step
from autodist.graph.step_editor import StepEditor
from autodist.graph.subgraph import subgraph
from autodist.graph.walks import topological
from autodist.kernels.base import Context, Kernel
from autodist.kernels.communicate.buckets import digest
from autodist.kernels.communicate.communicator import Communicator
from autodist.kernels.communicate.reduce_by_shuffle import own_rows, rows_of, weight_of
from autodist.kernels.communicate.results import Results
from autodist.placement.group import Group
from autodist.placement.synchrony import SyncMode


@dataclass(frozen=True)
class AsynchronousServers(Kernel[ReplicatedStep, ReplicatedStep]):
    """Updates owned variables at their owner by each worker's own mean gradient, as soon as the worker has computed it.

    The arithmetic of the update runs on the owner's device as part of the worker's step; only gradients are sent. A
    lock of the owner isolates the reads and writes of one worker's update. The lock is a queue with one token, taken
    when the gradients have arrived and put back after the last write. Locks are taken in owner order, so that workers
    cannot deadlock. If all variables are asynchronous, update counters are owned too and count every worker's updates.
    With staleness s, workers also exchange ticks: no worker ends a step before all others have ended the step s steps
    earlier (Ho et al., NeurIPS 2013).

        g → update(v)        becomes        g → lock → update(v) → unlock,        the last three at the owner
    """

    name: ClassVar[str] = "asynchronous-servers"
    after: ClassVar[Mapping[str, str]] = {
        "set-sync-mode": "it sets the synchrony of owned variables",
        "read-cached-copies": "it redirects the reads of the compute part",
    }

    def apply(self, step: ReplicatedStep, context: Context) -> ReplicatedStep:
        kept = {
            step.by_name[name].handle: step.owners[name]
            for name, synchrony in step.synchrony_of.items() if synchrony.mode is SyncMode.ASYNCHRONOUS
        }  # fmt: skip
        if not kept:
            return step
        updates = _Updates(step, context, kept)
        return updates.run() if updates.writes else step


@dataclass
class _Lock:
    """A critical section in which one worker has exclusive access to the variables of an owner.

    Attributes:
        owner: index of the worker that owns the variables.
        level: the update round.
        writes: the writes of the update.
        awaited: the gradients that must have arrived before the lock is taken.
        inside: the nodes that read or write while the lock is held.
    """

    owner: int
    level: int
    writes: list[str]
    awaited: list[str] = field(default_factory=list)
    inside: list[str] = field(default_factory=list)


class _Updates:
    """Implements one `AsynchronousServers.apply`; the methods are in the order of `run`."""

    def __init__(self, step: ReplicatedStep, context: Context, kept: Mapping[str, int]) -> None:
        self.step, self.context, self.kept = step, context, kept
        self.stages, self.synchrony_of = step.stages, step.synchrony_of
        self.results = Results(step)
        self.editor = self.results.editor
        self.effects = {n: e for n, e in step.graph_index.effects.items() if (e.reads | e.writes) & kept.keys()}
        self.writes = [name for name, effect in self.effects.items() if effect.writes & kept.keys()]
        self.reductions = [j for j in step.reductions if j.variable and step.by_name[j.variable].handle in kept]
        self.means: dict[str, PendingReduction] = {}

    def run(self) -> ReplicatedStep:
        if self.context.computes:
            for pending in self.reductions:
                self._divide(pending)
            locks = self._find_locks()
            self._place(locks)
            unlocked = self._lock_all(locks)
            self._add_ticks(unlocked)
        else:
            self._remove_writes()
        self._make_lock()
        return self.results.to_step(self.reductions)

    # -- gradients -------------------------------------------------------------------------------------------------

    def _divide(self, pending: PendingReduction) -> None:
        """Replaces the sum of a gradient by the mean over this worker's own examples."""
        with subgraph(self.editor, f"own_mean/{pending.name}") as f:
            if pending.is_sparse:
                made = rows_of(pending, [own_rows(f, pending)])
            else:
                made = [f.input(pending.local[0], pending.dtype, pending.shape)]
                for weight in weight_of(f, pending):
                    made = [tf.math.divide_no_nan(made[0], tf.cast(weight, pending.dtype))]
            made = [tf.identity(t) for t in made]
        names = [f.name(t) for t in made]
        self.results.set_result(pending, names)
        self.means.update({node_of(name): pending for name in names})

    def _remove_writes(self) -> None:
        """Removes the updates on a worker without replicas, which computes no gradients."""
        for write in self.writes:
            self.editor.replace_control(write, [])
        self.editor.remove(self.writes)

    # -- locks -----------------------------------------------------------------------------------------------------

    def _find_locks(self) -> list[_Lock]:
        """Returns the locks in the order in which they are taken: by update round, then by owner."""
        found: dict[tuple[int, int], _Lock] = {}
        for write in self.writes:
            owner = next(self.kept[h] for h in self.effects[write].writes if h in self.kept)
            lock = found.setdefault((self.stages.level_of(write), owner), _Lock(owner, self.stages.level_of(write), []))
            lock.writes.append(write)
        ordered = [lock for _, lock in sorted(found.items())]
        taken: set[str] = set()
        for lock in ordered:
            before = self.editor.ancestors(lock.writes)
            computed = self._gradient_ancestors(lock.level)
            lock.awaited = sorted(self.editor.ancestors(lock.writes, control=False) & self.means.keys())
            lock.inside = [
                name for name, effect in self.effects.items()
                if name in before and name not in computed | taken and self._is_at(effect, lock.owner)
            ]  # fmt: skip
            taken.update(lock.inside)
        return ordered

    def _gradient_ancestors(self, level: int) -> set[str]:
        """Returns the nodes that gradients up to an update round depend on; they cannot wait for these gradients."""
        return self.editor.ancestors(name for name, pending in self.means.items() if pending.level <= level)

    def _is_at(self, effect: Effect, owner: int) -> bool:
        return any(self.kept.get(h) == owner for h in effect.reads | effect.writes)

    def _lock_all(self, locks: Sequence[_Lock]) -> list[str]:
        """Adds the locks; returns the nodes after which all locks are released."""
        unlocked: dict[int, list[str]] = {}
        last: list[str] = []
        for lock in locks:
            earlier = [name for level, names in unlocked.items() if level < lock.level for name in names]
            with subgraph(self.editor, f"lock/{lock.level}/{lock.owner}") as f:
                queue = self._queue(lock.owner)
                with tf.device(self.context.cpu(lock.owner)):
                    with tf.control_dependencies([f.after([*lock.awaited, *earlier, *last])]):
                        token = queue.dequeue()
                    with tf.control_dependencies([f.after(lock.inside)]):
                        back = queue.enqueue(token)
            for name in lock.inside:
                self.editor.add_control(name, [node_of(f.name(token))])
            last = [node_of(f.name(token))]
            unlocked.setdefault(lock.level, []).append(f.name(back))
        names = [name for some in unlocked.values() for name in some]
        self.editor.run(names)
        return names

    def _queue(self, owner: int) -> tf.queue.FIFOQueue:
        with tf.device(self.context.cpu(owner)):
            return tf.queue.FIFOQueue(1, tf.bool, [[]], shared_name=f"autodist/lock/{owner}")

    def _make_lock(self) -> None:
        """Adds the queue of the owner's lock, initially unlocked."""
        me = self.context.worker
        if me in self.kept.values():
            with subgraph(self.editor, "lock/open") as f, tf.device(self.context.cpu(me)):
                opened = self._queue(me).enqueue(True)
            self.editor.initialize({f"lock/{me}": f.name(opened)})

    # -- placing ---------------------------------------------------------------------------------------------------

    def _place(self, locks: Sequence[_Lock]) -> None:
        """Places arithmetic that depends on variables and gradients of a single owner on that owner's device."""
        region = self.editor.ancestors(self.writes, control=False, stop=self.means.keys())
        region -= self._gradient_ancestors(max(lock.level for lock in locks))
        at: dict[str, frozenset[int]] = {}
        for node in topological(self.editor.to_graph_def()):
            if node.name not in region:
                continue
            effect = self.effects.get(node.name)
            found = {self.kept[h] for h in effect.reads | effect.writes if h in self.kept} if effect else set()
            for source in (node_of(i) for i in node.input if not is_control(i)):
                found |= {self._owner_of(self.means[source])} if source in self.means else at.get(source, frozenset())
            at[node.name] = frozenset(found)
            if len(found) == 1:
                self.editor[node.name].device = self._device(next(iter(found)))

    def _owner_of(self, pending: PendingReduction) -> int:
        return self.kept[self.step.by_name[pending.variable or ""].handle]

    def _device(self, owner: int) -> str:
        return device_of(owner, self.context.workers, self.context.first_device(owner))

    # -- time ------------------------------------------------------------------------------------------------------

    def _add_ticks(self, unlocked: Sequence[str]) -> None:
        bounded = {j.variable: self.synchrony_of[j.variable].staleness for j in self.reductions if j.variable}
        bounded = {name: staleness for name, staleness in bounded.items() if staleness}
        if not bounded:
            return
        staleness = min(bounded.values())
        key = f"clock/{digest(';'.join(sorted(bounded)))}/{staleness}"
        Clock(self.context, self.context.group, key, staleness).tick(self.editor, unlocked)


@dataclass(frozen=True)
class Clock:
    """A bounded-staleness clock: ticks between the workers of a group.

    In each step a worker puts a tick into a queue of every other worker and takes one from each. The queues start with
    `staleness` ticks: a worker that has ended n steps has received n - staleness ticks from the slowest.

    Attributes:
        context: the worker for which it is built.
        group: the group.
        key: a key that is the same on all workers.
        staleness: the number of steps that a worker may run ahead.
    """

    context: Context
    group: Group
    key: str
    staleness: int

    def tick(self, editor: StepEditor[Step], after: Sequence[str]) -> None:
        """Adds one step's ticks, sent after all of `after`, and this worker's initial ticks."""
        others = [w for w in self.group.workers if w != self.context.worker]
        initializers: dict[str, str] = {}
        with subgraph(editor, self.key) as f, tf.device(self.context.cpu(self.context.worker)):
            # The fastest worker has put `staleness` more ticks than the slowest has taken, whose queue started with as
            # many.
            exchange = Communicator(f, self.context, self.key, self.group, 2 * self.staleness + 2)
            ended = tf.constant(True)
            for other in others:
                exchange.send(other, "tick", [ended], after)
                exchange.receive(other, "tick", [ended])
            for other in others:
                first = exchange.prefill(other, "tick", [ended], self.staleness)
                initializers[f"{self.key}/{other}"] = f.name(first)
        editor.run(exchange.effects)
        editor.initialize(initializers)
