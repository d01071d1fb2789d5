"""Versions: the value of an owned variable that each worker reads, and the messages that permit its next write.

A write at the owner ends a version of the variable. It waits until every worker has read that version, and for nothing
else. A worker whose gradient reaches the owner in between has already read it: the gradient waits for the read, and the
write for the gradient. Any other worker that reads the version sends an acknowledgement.

If workers may fetch different outputs, no worker knows the fetches of another. Each then acknowledges the reads that it
may fetch, and waits for those that it fetches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from autodist.graph.effects import NO_EFFECT
from autodist.graph.execution_order import message_of
from autodist.graph.names import node_of
from autodist.graph.parts import PendingReduction
from autodist.graph.step import ReplicatedStep
from autodist.graph.walks import reach
from autodist.kernels.base import Context
from autodist.kernels.communicate.buckets import digest
from autodist.kernels.communicate.node_assignment import Workers
from autodist.kernels.replica_dependent import sources_of_replicas


@dataclass(frozen=True)
class Acknowledgement:
    """An acknowledgement: a message from one worker that it has read variables of another.

    Attributes:
        reader: the worker that has read them.
        owner: the worker that holds them.
        reads: the captured names of the reads; empty if only the worker's previous step must have ended.
        fetchable: those reads that the worker runs only if it fetches a tensor that depends on them.
        writes: the nodes that wait for the message.
        key: the same on both workers, and in all programs that write the same variables.
    """

    reader: int
    owner: int
    reads: tuple[str, ...]
    fetchable: frozenset[str]
    writes: tuple[str, ...]
    key: str


@dataclass(frozen=True)
class _Wait:
    """A write at `owner` that waits for reads of `reader`; reads in `fetchable` count only if they are fetched."""

    reader: int
    owner: int
    reads: tuple[str, ...]
    fetchable: frozenset[str]
    write: str


class Versions:
    """The reads and writes of a step's owned variables, in the step's execution order.

    Args:
        step: the step; it has the execution order.
        owner: the owner of each owned variable, by handle.
        reductions: the gradients that are sent to the owners.
        context: the worker for which the step is rewritten. Only `reads_before` depends on the worker.
    """

    def __init__(
        self,
        step: ReplicatedStep,
        owner: Mapping[str, int],
        reductions: Sequence[PendingReduction],
        context: Context,
    ) -> None:
        assert step.order is not None, "set by SetSyncMode"
        self._step, self._owner, self._context = step, owner, context
        self._order, self._copies, self._once = step.order, step.copies, step.stages.once
        self._reductions: dict[str, list[PendingReduction]] = {}
        for pending in reductions:
            self._reductions.setdefault(step.by_name[pending.variable or ""].handle, []).append(pending)

    # -- reads that gradients acknowledge --------------------------------------------------------------------------

    def reads_before(self, reductions: Iterable[PendingReduction]) -> list[str]:
        """Returns this worker's reads that must finish before it sends the gradients of one message to their owner.

        These are its replicas' reads of the gradients' variables, and of the owner's variables without a gradient that
        may be written with them (a target network).
        """
        members = list(reductions)
        sent = self._order.of_reduction(members[0])
        trained = {self._step.by_name[j.variable or ""].handle for j in members}
        owner = self._owner[min(trained)]
        followers = [h for h in self._own_reads if h not in self._reductions and self._owner[h] == owner]
        own = sorted({read for handle in trained for read in self._own_reads.get(handle, ())})
        early = [read for handle in followers for read in self._own_reads[handle]]
        return [name for _, name in dict.fromkeys([*own, *early]) if self._position(name) < sent]

    @cached_property
    def _own_reads(self) -> Mapping[str, list[tuple[int, str]]]:
        """By handle, the reads of a variable by this worker's replicas, each with its position among all effects."""
        found: dict[str, list[tuple[int, str]]] = {}
        for position, (name, effect) in enumerate(self._step.graph_index.effects.items()):
            if not effect.writes and name not in self._once and self._captured(name) in self._order.position:
                for handle in effect.reads & self._owner.keys():
                    found.setdefault(handle, []).append((position, name))
        return found

    @cached_property
    def gradients_before(self) -> Mapping[str, list[PendingReduction]]:
        """The gradients that each write waits for: those of its variable or, if it has none, of the same owner."""
        return {write: list(self._gradients_before(write).values()) for write in self._writes}

    def _gradients_before(self, write: str) -> dict[str, PendingReduction]:
        position, before = self._order.position, self._order.position[write]
        found: dict[str, PendingReduction] = {}
        for handle in sorted(self._writes[write]):
            is_trained = handle in self._reductions
            first = (
                -1 if is_trained else min((position[r] for r in self._replica_reads.get(handle, ())), default=before)
            )
            for trained in [handle] if is_trained else self._reductions:
                if self._owner[trained] == self._owner[handle]:
                    for pending in self._reductions[trained]:
                        if first < self._order.of_reduction(pending) < before:
                            found[pending.name] = pending
        return found

    def own(self, message: Acknowledgement) -> list[str]:
        """Returns this worker's nodes for the reads that it acknowledges, for all replicas."""
        fetched = reach(map(node_of, self._step.outputs), self._step.graph_index.data.__getitem__)
        return [
            name for name in self._step.graph_index.effects
            if self._captured(name) in message.reads
            and (self._captured(name) not in message.fetchable or name in fetched)
        ]  # fmt: skip

    def awaited(self, acknowledgements: Iterable[Acknowledgement]) -> Mapping[str, Sequence[str]]:
        """Returns, by write and by gradient message, the work of other workers that must precede it."""
        found: dict[str, dict[str, None]] = {}
        for write, reductions in self.gradients_before.items():
            found.setdefault(write, {}).update(dict.fromkeys(map(message_of, reductions)))
        for handle, reductions in self._reductions.items():
            for pending in reductions:
                reads = [
                    r
                    for r in self._replica_reads.get(handle, ())
                    if self._position(r) < self._order.of_reduction(pending)
                ]
                found.setdefault(message_of(pending), {}).update(dict.fromkeys(reads))
        for message in acknowledgements:
            for write in message.writes:
                found.setdefault(write, {}).update(dict.fromkeys(message.reads))
        return {name: list(names) for name, names in found.items()}

    # -- other acknowledgements ------------------------------------------------------------------------------------

    def acknowledgements(self, runs: Mapping[str, Workers]) -> list[Acknowledgement]:
        """Returns the acknowledgements that gradients do not imply, in the same order on all workers.

        Args:
            runs: for nodes whose inputs not all workers have, the workers that run them.
        """
        open_: dict[tuple[int, int], list[_Wait]] = {}
        closed: list[list[_Wait]] = []
        position = self._order.position
        for wait in self._waits(runs):
            together = open_.setdefault((wait.reader, wait.owner), [])
            # All reads must finish before the first of the writes that wait for one message.
            if together and any(position[read] > position[together[0].write] for read in wait.reads):
                closed.append(open_[wait.reader, wait.owner])
                together = open_[wait.reader, wait.owner] = []
            together.append(wait)
        return self._as_messages([*closed, *open_.values()])

    def _as_messages(self, groups: Iterable[Sequence[_Wait]]) -> list[Acknowledgement]:
        found = []
        times: Counter[tuple[int, str]] = Counter()
        for waits in sorted(groups, key=lambda group: self._order.position[group[0].write]):
            names = sorted({self._step.by_handle[h].name for wait in waits for h in self._writes[wait.write]})
            reader, what = waits[0].reader, digest(";".join(names))
            key = f"read/{what}/{times[reader, what]}"
            times[reader, what] += 1
            reads = dict.fromkeys(read for wait in waits for read in wait.reads)
            fetchable = frozenset(read for wait in waits for read in wait.fetchable)
            writes = dict.fromkeys(wait.write for wait in waits)
            found.append(Acknowledgement(reader, waits[0].owner, tuple(reads), fetchable, tuple(writes), key))
        return found

    def _waits(self, runs: Mapping[str, Workers]) -> Iterator[_Wait]:
        """Yields the reads, besides those implied by gradients, that writes wait for, in write order."""
        readers, position, fetchable = self._find_readers(runs), self._order.position, self._fetchable
        final = {handle: position[write] for write in self._writes for handle in self._writes[write]}
        last = dict.fromkeys(final, -1)
        for write, handles in self._writes.items():
            [owner] = {self._owner[handle] for handle in handles}
            sent = max((self._order.of_reduction(pending) for pending in self.gradients_before[write]), default=-1)
            for worker in sorted(self._context.group.everyone):
                if worker == owner:
                    continue
                acknowledged = sent if worker in self._context.group else -1
                reads = [
                    read for handle in sorted(handles) for read in self._reads.get(handle, ())
                    if (readers[read] >> worker & 1 or read in fetchable)
                    and last[handle] < position[read] < position[write]
                    and not (position[read] < acknowledged and read not in self._once)
                ]  # fmt: skip
                is_late = acknowledged < 0 and any(
                    last[handle] < 0 and self._reads_last_version(readers, worker, handle, final[handle])
                    for handle in handles
                )
                if reads or is_late:
                    maybe = frozenset(read for read in reads if not readers[read] >> worker & 1)
                    yield _Wait(worker, owner, tuple(reads), maybe, write)
            last.update(dict.fromkeys(handles, position[write]))

    def _reads_last_version(self, readers: Mapping[str, Workers], worker: int, handle: str, final: int) -> bool:
        """Returns True if a worker may read a variable after its last write; the next step's first write then waits."""
        if not self._context.reduces_outputs:
            return True
        return any(
            self._order.position[read] > final and readers[read] >> worker & 1 for read in self._reads.get(handle, ())
        )

    # -- readers of variables --------------------------------------------------------------------------------------

    @cached_property
    def _writes(self) -> Mapping[str, frozenset[str]]:
        """The writes of owned variables in execution order, each with the handles of the variables."""
        effects = self._order.graph_index.effects
        found = {name: e.writes & self._owner.keys() for name, e in effects.items() if e.writes & self._owner.keys()}
        return {name: found[name] for name in sorted(found, key=self._order.position.__getitem__)}

    @cached_property
    def _reads(self) -> Mapping[str, list[str]]:
        """By handle, the nodes that only read an owned variable; of the replicas' reads, those of the first replica."""
        found: dict[str, list[str]] = {}
        for name, effect in self._order.graph_index.effects.items():
            if self._captured(name) == name:
                for handle in (effect.reads - effect.writes) & self._owner.keys():
                    found.setdefault(handle, []).append(name)
        return found

    @cached_property
    def _fetchable(self) -> frozenset[str]:
        """The reads that any worker may fetch independently, and that the step orders before a write of their variable.

        All workers have these, since they have the write.
        """
        if self._context.reduces_outputs:
            return frozenset()
        bits = {handle: 1 << k for k, handle in enumerate(self._owner)}
        written: dict[str, int] = {}
        for name in reversed(self._order.names):
            mask = written.get(name, 0) | sum(bits[handle] for handle in self._writes.get(name, ()))
            for source in self._order.sources[name]:
                written[source] = written.get(source, 0) | mask
        return frozenset(
            read for handle, reads in self._reads.items() for read in reads if written.get(read, 0) & bits[handle]
        )

    @cached_property
    def _replica_reads(self) -> Mapping[str, list[str]]:
        """The reads of `_reads` that replicas make."""
        return {handle: [r for r in reads if r not in self._once] for handle, reads in self._reads.items()}

    def _captured(self, name: str) -> str:
        return self._copies[name][1] if name in self._copies else name

    def _position(self, name: str) -> int:
        return self._order.position[self._captured(name)]

    def _find_readers(self, runs: Mapping[str, Workers]) -> Mapping[str, Workers]:
        """Returns, by node, the workers that need its value."""
        context, graph_index = self._context, self._order.graph_index
        every, computing = (sum(1 << w for w in ws) for ws in (context.group.everyone, context.group.workers))
        differs = self._find_replica_dependent()
        needed: dict[str, Workers] = {}
        for message in self._order.messages:
            needed.update(dict.fromkeys(self._order.sources[message], computing))
        if context.reduces_outputs:  # otherwise workers may fetch different outputs
            needed.update(dict.fromkeys([*map(node_of, self._step.outputs), *self._step.targets], every))
        found: dict[str, Workers] = {}
        for name in reversed(graph_index.order):
            effect = graph_index.effects.get(name, NO_EFFECT)
            if effect.writes:
                owners = {self._owner[handle] for handle in effect.writes & self._owner.keys()}
                workers = sum(1 << owner for owner in owners) or every
            else:
                workers = runs[name] if name in runs else needed.get(name, 0)
            found[name] = workers = workers & computing if name in differs else workers
            for source in graph_index.data[name]:
                needed[source] = needed.get(source, 0) | workers
        return found

    def _find_replica_dependent(self) -> set[str]:
        """Returns the nodes that differ between replicas; tensors that a message brings are the same for all."""
        graph_index, messages = self._order.graph_index, set(self._order.messages)
        found = set(sources_of_replicas(self._step, graph_index))
        for name in graph_index.order:
            if not found.isdisjoint(graph_index.data[name]) and messages.isdisjoint(self._order.sources[name]):
                found.add(name)
        return found
