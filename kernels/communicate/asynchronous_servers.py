"""Asynchronous parameter servers: each worker applies its own gradients without waiting for other workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import tensorflow as tf

from autodist.graph.devices import device_of
from autodist.graph.effects import Effect
from autodist.graph.names import data_inputs, node_of
from autodist.graph.parts import PendingReduction
from autodist.graph.step import ReplicatedStep, Step
from autodist.graph.step_editor import StepEditor
from autodist.graph.subgraph import subgraph
from autodist.kernels.base import Context, Kernel
from autodist.kernels.communicate.buckets import PACK_BYTES, digest, key_of, make_buckets
from autodist.kernels.communicate.communicator import Communicator
from autodist.kernels.communicate.own_means import use_own_mean
from autodist.kernels.communicate.results import Results
from autodist.kernels.communicate.standing_program import FindMovedNodes, MovedNodes, StandingProgram
from autodist.placement.group import Group
from autodist.placement.synchrony import SyncMode


@dataclass(frozen=True)
class AsynchronousServers(Kernel[ReplicatedStep, ReplicatedStep]):
    """Updates owned variables at their owner by each worker's own mean gradient, as soon as the worker has computed it.

    The arithmetic of the update runs on the owner's device in a program of the worker (`StandingProgram`), whose runs
    begin before the step and wait for its gradients; only gradients are sent. The step waits for the update, and
    receives the new values for its cached copies. A lock of the owner isolates the reads and writes of one worker's
    update. The lock is a queue with one token, taken when the gradients have arrived and put back after the last write.
    Locks are taken in owner order, so that workers cannot deadlock. If all variables are asynchronous, update counters
    are owned too and count every worker's updates. With staleness s, workers also exchange ticks: no worker ends a step
    before all others have ended the step s steps earlier (Ho et al., NeurIPS 2013).

        g → update(v)    becomes    g → send,  done;    in parallel:    g → lock → update(v) → unlock → done
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
        self.program = StandingProgram(self.editor, context)

    def run(self) -> ReplicatedStep:
        if self.context.computes:
            for pending in self.reductions:
                names = use_own_mean(self.results, pending)
                self.means.update({node_of(name): pending for name in names})
            self._move()
        else:
            self._remove_writes()
        self._make_lock()
        return self.results.to_step(self.reductions)

    def _move(self) -> None:
        """Moves the updates into the standing program, and makes the step wait for them."""
        levels = {name: pending.level for name, pending in self.means.items()}
        moved = FindMovedNodes(self.step, self.editor, self.kept, levels, self.writes).run()
        locks = self._find_locks(moved)
        self._send(moved)
        self._place(moved)
        unlocked = self._lock_all(locks)
        self.program.effects += [*unlocked, *(self.program.copies[name] for name in self.writes)]
        self._add_ticks([self._receive(moved, unlocked)])
        self.editor.stand(self.program.effects)

    # -- gradients -------------------------------------------------------------------------------------------------

    def _send(self, moved: MovedNodes) -> None:
        """Sends the tensors that the updates need, and copies the updates."""
        early = [name for name in moved.needed if node_of(name) not in moved.late]
        orders = sorted({name for names in moved.orders.values() for name in names})
        begin = self.program.send("begin", early, [name for name in orders if name not in moved.late])
        takes = {
            name: self.program.send(f"order/{digest(name)}", [], [name]) if name in moved.late else begin
            for name in orders
        }  # fmt: skip
        for name in moved.needed:
            if node_of(name) in moved.late:
                self.program.send(f"needed/{digest(name)}", [name])
        dense = make_buckets([j for j in self.reductions if not j.is_sparse], self._owner_of, PACK_BYTES)
        sparse = [[j] for j in self.reductions if j.is_sparse]
        for reductions in (*(bucket.reductions for bucket in dense), *sparse):
            names = [self.results.now(t) for pending in reductions for t in pending.result]
            self.program.send(key_of(reductions), names, device=self._device(self._owner_of(reductions[0])))
        self.program.copy(moved.names, {name: {takes[n] for n in names} for name, names in moved.orders.items()})

    def _receive(self, moved: MovedNodes, unlocked: Sequence[str]) -> str:
        """Makes the step wait for the updates, and read the values that they return; returns the node that waits."""
        names = set(moved.names)
        sent = [*map(node_of, moved.needed), *self.means, *(n for some in moved.orders.values() for n in some)]
        feeding = self.editor.ancestors(sent)
        for write in self.writes:
            between = [c for c in self.editor.consumers(write) if c in feeding and c not in names]
            if between:  # a later part of the update waits for them
                take, _ = self.program.send_back(f"written/{digest(write)}", [], [self.program.copies[write]])
                self.editor.replace_control(write, [take], between)
        for number, (owner, group) in enumerate(self._by_message(moved.returned)):
            _, values = self.program.send_back(f"values/{number}", group, device=self._device(owner))
            for old, new in zip(group, values, strict=True):
                outside = [c for c in self.editor.consumers(node_of(old)) if c not in names]
                self.editor.rewire(old, new, outside)
                self.editor.replace_output(old, new)
        done, _ = self.program.send_back("done", [], unlocked)
        for write in self.writes:
            self.editor.replace_control(write, [done])
        self.editor.remove(self.writes)
        return done

    def _by_message(self, returned: Mapping[str, int]) -> list[tuple[int, list[str]]]:
        """Groups tensors by the owner that sends them and by update round, up to `PACK_BYTES`."""
        found: list[tuple[int, list[str]]] = []
        free: dict[tuple[int, int], int] = {}
        last: dict[tuple[int, int], list[str]] = {}
        for name, level in returned.items():
            effect, spec = self.effects[node_of(name)], self.editor.spec(name)
            owner = next(self.kept[h] for h in sorted(effect.reads | effect.writes) if h in self.kept)
            size = (spec.shape.num_elements() or PACK_BYTES) * spec.dtype.size
            if size > free.get((owner, level), 0):
                last[owner, level], free[owner, level] = [], PACK_BYTES
                found.append((owner, last[owner, level]))
            last[owner, level].append(name)
            free[owner, level] -= size
        return found

    def _remove_writes(self) -> None:
        """Removes the updates on a worker without replicas, which computes no gradients."""
        for write in self.writes:
            self.editor.replace_control(write, [])
        self.editor.remove(self.writes)

    # -- locks -----------------------------------------------------------------------------------------------------

    def _find_locks(self, moved: MovedNodes) -> list[_Lock]:
        """Returns the locks in the order in which they are taken: by update round, then by owner."""
        found: dict[tuple[int, int], _Lock] = {}
        for write in self.writes:
            owner = next(self.kept[h] for h in self.effects[write].writes if h in self.kept)
            lock = found.setdefault((self.stages.level_of(write), owner), _Lock(owner, self.stages.level_of(write), []))
            lock.writes.append(write)
        ordered = [lock for _, lock in sorted(found.items())]
        left = {name: effect for name, effect in self.effects.items() if name in moved.updates}
        for lock in ordered:
            before = self.editor.ancestors(lock.writes) - self._gradient_ancestors(lock.level)
            lock.awaited = sorted(self.editor.ancestors(lock.writes, control=False) & self.means.keys())
            lock.inside = [name for name, e in left.items() if name in before and self._is_at(e, lock.owner)]
            left = {name: effect for name, effect in left.items() if name not in lock.inside}
        return ordered

    def _gradient_ancestors(self, level: int) -> set[str]:
        """Returns the nodes that gradients up to an update round depend on; they cannot wait for these gradients."""
        return self.editor.ancestors(name for name, pending in self.means.items() if pending.level <= level)

    def _is_at(self, effect: Effect, owner: int) -> bool:
        return any(self.kept.get(h) == owner for h in effect.reads | effect.writes)

    def _lock_all(self, locks: Sequence[_Lock]) -> list[str]:
        """Adds the locks to the program; returns the nodes after which all locks are released."""
        unlocked: dict[int, list[str]] = {}
        last: list[str] = []
        for lock in locks:
            awaited = [self.program.begin, *(node_of(self.program.now(name)) for name in lock.awaited)]
            inside = [self.program.copies[name] for name in lock.inside]
            earlier = [name for level, names in unlocked.items() if level < lock.level for name in names]
            with subgraph(self.editor, f"lock/{lock.level}/{lock.owner}") as f:
                queue = self._queue(lock.owner)
                with tf.device(self.context.cpu(lock.owner)):
                    with tf.control_dependencies([f.after([*awaited, *earlier, *last])]):
                        token = queue.dequeue()
                    with tf.control_dependencies([f.after(inside)]):
                        back = queue.enqueue(token)
            for name in inside:
                self.editor.add_control(name, [node_of(f.name(token))])
            last = [node_of(f.name(token))]
            unlocked.setdefault(lock.level, []).append(f.name(back))
        return [name for some in unlocked.values() for name in some]

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

    def _place(self, moved: MovedNodes) -> None:
        """Places arithmetic at the single owner that has its variables and gradients, or that reads its result."""
        at: dict[str, frozenset[int]] = {}
        for name in moved.names:
            effect = self.effects.get(name)
            found = {self.kept[h] for h in effect.reads | effect.writes if h in self.kept} if effect else set()
            for source in map(node_of, data_inputs(self.editor[name])):
                found |= {self._owner_of(self.means[source])} if source in self.means else at.get(source, frozenset())
            at[name] = frozenset(found)
        for name in reversed(moved.names):
            read_by = [at.get(consumer, frozenset()) for consumer in self.editor.consumers(name)]
            at[name] = at[name] or frozenset().union(*read_by)
            if len(at[name]) == 1:
                self.editor[self.program.copies[name]].device = self._device(next(iter(at[name])))

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
