"""Asynchronous parameter servers: each worker's gradient is an update of its own, and nobody waits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import tensorflow as tf

from autodist.graph.devices import device_of
from autodist.graph.effects import Effect
from autodist.graph.names import is_control, node_of
from autodist.graph.parts import PendingReduction
from autodist.graph.placement import SyncMode
from autodist.graph.step import Replication, Step
from autodist.graph.step_editor import StepEditor
from autodist.graph.subgraph import subgraph
from autodist.graph.walks import topological
from autodist.kernels.base import Context, Kernel
from autodist.kernels.communicate.buckets import digest
from autodist.kernels.communicate.communicator import Communicator
from autodist.kernels.communicate.reduce_by_shuffle import own_rows, rows_of, weight_of
from autodist.kernels.communicate.results import Results


@dataclass(frozen=True)
class AsynchronousServers(Kernel):
    """Each worker updates owned variables by the mean over its own examples, at the owner, as soon as it has it.

    The update's arithmetic runs on the owner's device, as part of the worker's own step: gradients travel there, and
    nothing else does. What one worker's update reads and writes at an owner it reads and writes alone, under the
    owner's lock: a queue with one token, taken when the gradients are there and put back after the last write. Locks
    are taken in the order of the owners, so that no two workers wait for each other. Counters of updates are owned too
    where all variables are asynchronous, and count every worker's. With staleness s, workers also exchange ticks: none
    ends a step before all others have ended the one that lies s steps before (Ho et al., NeurIPS 2013).

        g → update(v)        becomes        g → lock → update(v) → unlock,        the last three at the owner
    """

    name: ClassVar[str] = "asynchronous-servers"

    def apply(self, item: Step, context: Context) -> Step:
        replication = item.replication
        if replication is None:
            return item
        kept = {
            item.by_name[name].handle: placement.owner
            for name, placement in replication.variable_placements.items() if placement.pace is SyncMode.ASYNCHRONOUS
        }  # fmt: skip
        if not kept:
            return item
        updates = _Updates(item, replication, context, kept)
        return updates.run() if updates.writes else item


@dataclass
class _Lock:
    """The time in which one worker alone works on what an owner holds.

    Attributes:
        owner: whose.
        level: of the update stage.
        writes: of the update.
        awaited: gradients that it starts from.
        inside: all that reads or writes in this time.
    """

    owner: int
    level: int
    writes: list[str]
    awaited: list[str] = field(default_factory=list)
    inside: list[str] = field(default_factory=list)


class _Updates:
    """The work of one `AsynchronousServers.apply`, in the order of `run`."""

    def __init__(self, item: Step, replication: Replication, context: Context, kept: Mapping[str, int]) -> None:
        self.item, self.context, self.kept = item, context, kept
        self.stages, self.variable_placements = replication.stages, replication.variable_placements
        self.results = Results(item, replication)
        self.editor = self.results.editor
        self.effects = {n: e for n, e in item.graph_index.effects.items() if (e.reads | e.writes) & kept.keys()}
        self.writes = [name for name, effect in self.effects.items() if effect.writes & kept.keys()]
        self.joins = [j for j in replication.joins if j.variable and item.by_name[j.variable].handle in kept]
        self.means: dict[str, PendingReduction] = {}

    def run(self) -> Step:
        if self.context.computes:
            for join in self.joins:
                self._divide(join)
            locks = self._find_locks()
            self._place(locks)
            unlocked = self._lock_all(locks)
            self._keep_time(unlocked)
        else:
            self._leave_out_writes()
        self._make_lock()
        return self.results.to_item(self.joins)

    # -- gradients -------------------------------------------------------------------------------------------------

    def _divide(self, join: PendingReduction) -> None:
        """The mean over this worker's own examples in the place of the sum."""
        with subgraph(self.editor, f"own_mean/{join.name}") as f:
            if join.is_sparse:
                made = rows_of(join, [own_rows(f, join)])
            else:
                made = [f.input(join.local[0], join.dtype, join.shape)]
                for weight in weight_of(f, join):
                    made = [tf.math.divide_no_nan(made[0], tf.cast(weight, join.dtype))]
            made = [tf.identity(t) for t in made]
        names = [f.name(t) for t in made]
        self.results.give(join, names)
        self.means.update({node_of(name): join for name in names})

    def _leave_out_writes(self) -> None:
        """A worker without replicas makes no gradient, and so no update."""
        for write in self.writes:
            self.editor.replace_control(write, [])
        self.editor.remove(self.writes)

    # -- locks -----------------------------------------------------------------------------------------------------

    def _find_locks(self) -> list[_Lock]:
        """In the order in which they are taken: by stage, then by owner."""
        found: dict[tuple[int, int], _Lock] = {}
        for write in self.writes:
            owner = next(self.kept[h] for h in self.effects[write].writes if h in self.kept)
            lock = found.setdefault((self.stages.level_of(write), owner), _Lock(owner, self.stages.level_of(write), []))
            lock.writes.append(write)
        ordered = [lock for _, lock in sorted(found.items())]
        taken: set[str] = set()
        for lock in ordered:
            before = self.editor.ancestors(lock.writes)
            computed = self._computes(lock.level)
            lock.awaited = sorted(self.editor.ancestors(lock.writes, control=False) & self.means.keys())
            lock.inside = [
                name for name, effect in self.effects.items()
                if name in before and name not in computed | taken and self._is_at(effect, lock.owner)
            ]  # fmt: skip
            taken.update(lock.inside)
        return ordered

    def _computes(self, level: int) -> set[str]:
        """What leads to the gradients of a stage, or of an earlier one; it cannot wait for them."""
        return self.editor.ancestors(name for name, join in self.means.items() if join.level <= level)

    def _is_at(self, effect: Effect, owner: int) -> bool:
        return any(self.kept.get(h) == owner for h in effect.reads | effect.writes)

    def _lock_all(self, locks: Sequence[_Lock]) -> list[str]:
        """Returns the nodes after which nothing is locked any more."""
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
        """The owner's lock is open at first."""
        me = self.context.worker
        if me in self.kept.values():
            with subgraph(self.editor, "lock/open") as f, tf.device(self.context.cpu(me)):
                opened = self._queue(me).enqueue(True)
            self.editor.initialize({f"lock/{me}": f.name(opened)})

    # -- placing ---------------------------------------------------------------------------------------------------

    def _place(self, locks: Sequence[_Lock]) -> None:
        """Arithmetic on what one owner holds, and on the gradients for it, stands where the owner's variables are."""
        region = self.editor.ancestors(self.writes, control=False, stop=self.means.keys())
        region -= self._computes(max(lock.level for lock in locks))
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

    def _owner_of(self, join: PendingReduction) -> int:
        return self.kept[self.item.by_name[join.variable or ""].handle]

    def _device(self, owner: int) -> str:
        return device_of(owner, self.context.workers, self.context.first_device(owner))

    # -- time ------------------------------------------------------------------------------------------------------

    def _keep_time(self, unlocked: Iterable[str]) -> None:
        bounded = {j.variable: self.variable_placements[j.variable].staleness for j in self.joins if j.variable}
        bounded = {name: staleness for name, staleness in bounded.items() if staleness}
        if not bounded:
            return
        staleness = min(bounded.values())
        clock = Clock(self.context, f"clock/{digest(';'.join(sorted(bounded)))}/{staleness}", staleness)
        clock.tick(self.editor, unlocked)


@dataclass(frozen=True)
class Clock:
    """Ticks between the workers that compute.

    In each step a worker puts a tick into a queue of every other one and takes one from each. The queues start with
    `staleness` ticks, so that a worker which has ended n steps has had n - staleness ticks from the slowest.

    Attributes:
        context: for whom it is built.
        key: the same on all workers.
        staleness: how many steps a worker may be ahead.
    """

    context: Context
    key: str
    staleness: int

    def tick(self, editor: StepEditor, after: Iterable[str]) -> None:
        """Builds one step's ticks, put once all of `after` ran, and this worker's first ones, before all steps."""
        others = [w for w in self.context.computing if w != self.context.worker]
        initializers: dict[str, str] = {}
        with subgraph(editor, self.key) as f, tf.device(self.context.cpu(self.context.worker)):
            # The fastest has put staleness more than the slowest has taken, which started with as many.
            exchange = Communicator(f, self.context, self.key, 2 * self.staleness + 2)
            ended = tf.constant(True)
            for other in others:
                exchange.send(other, "tick", [ended], [f.after(after)])
                exchange.receive(other, "tick", [ended])
            for other in others:
                first = exchange.fill(other, "tick", [ended], self.staleness)
                initializers[f"{self.key}/{other}"] = f.name(first)
        editor.run(exchange.effects)
        editor.initialize(initializers)
