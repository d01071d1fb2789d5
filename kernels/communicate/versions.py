"""Versions: the order of the writes of owned variables, and of reads at the owner that other workers do not know of.

If workers may fetch different outputs, a worker reads a variable at the owner's device for a tensor that it alone
fetches. The owner's next write waits for a message that the worker sends after the read: a gradient, or else a start
signal.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

from autodist.errors import FetchedElsewhereError
from autodist.graph.execution_order import message_of
from autodist.graph.names import node_of
from autodist.graph.parts import PendingReduction
from autodist.graph.step import ReplicatedStep
from autodist.kernels.communicate.buckets import digest
from autodist.kernels.communicate.remote_reads import ReadGroup
from autodist.kernels.context import Context


@dataclass(frozen=True)
class StartSignal:
    """A message that the earlier steps of a worker have ended, and its early reads in this step.

    Attributes:
        worker: the worker that sends it.
        owner: the worker whose writes wait for it.
        writes: the nodes that wait for the message.
        key: the same on both workers, and in all programs that write the same variables.
    """

    worker: int
    owner: int
    writes: tuple[str, ...]
    key: str


class Versions:
    """The reads and writes of a step's owned variables, in the step's execution order.

    Args:
        step: the step; it has the execution order.
        owner: the owner of each owned variable, by handle.
        reductions: the gradients that are sent to the owners.
        read_groups: the reads that owners make for other workers.
        context: the worker for which the step is rewritten. Only `early_reads` depends on the worker.

    Attributes:
        writes: the writes of each owned variable in execution order, by handle.
    """

    def __init__(
        self,
        step: ReplicatedStep,
        owner: Mapping[str, int],
        reductions: Sequence[PendingReduction],
        read_groups: Sequence[ReadGroup],
        context: Context,
    ) -> None:
        assert step.order is not None, "set by SetSyncMode"
        self._step, self._owner, self._read_groups, self._context = step, owner, read_groups, context
        self._order = step.order
        self.writes = step.order.writes_of(owner)
        self._reductions: dict[str, list[PendingReduction]] = {}
        for pending in reductions:
            self._reductions.setdefault(step.by_name[pending.variable or ""].handle, []).append(pending)

    # -- writes ----------------------------------------------------------------------------------------------------

    @cached_property
    def _writes(self) -> Mapping[str, frozenset[str]]:
        """The writes of owned variables in execution order, each with the handles of the variables."""
        effects = self._order.graph_index.effects
        found = {name: e.writes & self._owner.keys() for name, e in effects.items() if e.writes & self._owner.keys()}
        return {name: found[name] for name in sorted(found, key=self._order.position.__getitem__)}

    @cached_property
    def gradients_before(self) -> Mapping[str, list[PendingReduction]]:
        """The gradients that each write waits for: those of its variable or, if it has none, of the same owner.

        Every gradient of a worker is sent after the worker's early reads. A write that is computed from some gradients
        of the owner, such as that of an optimizer's slot, therefore waits for these alone: the update of one variable
        does not wait for the gradients of others.
        """
        found = {}
        for write in self._writes:
            gradients = self._gradients_before(write).values()
            found[write] = [g for g in gradients if self._used.get(write, 0) & self._bits[g.name]] or [*gradients]
        return found

    @cached_property
    def _bits(self) -> Mapping[str, int]:
        """A bit for each gradient, by its name."""
        return {pending.name: 1 << k for k, pending in enumerate(chain(*self._reductions.values()))}

    @cached_property
    def _used(self) -> Mapping[str, int]:
        """The gradients that each node is computed from or runs after, as a mask of `_bits`."""
        graph_index, found = self._order.graph_index, dict[str, int]()
        for pending in chain(*self._reductions.values()):
            for name in map(node_of, pending.result):
                found[name] = found.get(name, 0) | self._bits[pending.name]
        for name in graph_index.order:
            mask = found.get(name, 0)
            for source in graph_index.sources[name]:
                mask |= found.get(source, 0)
            if mask:
                found[name] = mask
        return found

    def _gradients_before(self, write: str) -> dict[str, PendingReduction]:
        position, before = self._order.position, self._order.position[write]
        found: dict[str, PendingReduction] = {}
        for handle in sorted(self._writes[write]):
            is_trained = handle in self._reductions
            first = -1 if is_trained else min((position[r] for r in self._replica_reads(handle)), default=before)
            for trained in [handle] if is_trained else self._reductions:
                if self._owner[trained] == self._owner[handle]:
                    for pending in self._reductions[trained]:
                        if first < self._order.of_reduction(pending) < before:
                            found[pending.name] = pending
        return found

    def _replica_reads(self, handle: str) -> list[str]:
        """Returns the nodes of the first replica that only read a variable."""
        return [
            name for name, effect in self._order.graph_index.effects.items()
            if handle in effect.reads - effect.writes and name not in self._step.stages.once
            and self._captured(name) == name
        ]  # fmt: skip

    def awaited(self) -> Mapping[str, Sequence[str]]:
        """Returns, by write, the work of other workers that must precede it."""
        found = {write: dict.fromkeys(map(message_of, pending)) for write, pending in self.gradients_before.items()}
        for group in self._read_groups:
            nodes = dict.fromkeys(access.node for access in group.readers)
            for node, handle in group.readers:
                for write in self.writes.get(handle, ()):
                    if self._order.position[write] > self._order.position[node]:
                        found[write].update(nodes)
        return {write: list(names) for write, names in found.items()}

    # -- reads that other workers do not know of -------------------------------------------------------------------

    def early_reads(self, owner: int, needed: Collection[str]) -> list[str]:
        """Returns this worker's reads at the device of `owner` that must finish before its first message to it.

        Args:
            owner: another worker.
            needed: the nodes whose values this worker uses.

        Raises:
            FetchedElsewhereError: a fetch reads a variable between two of its writes, or after a gradient and before a
                write.
        """
        found = [] if self._context.reduces_outputs else [r for r in self._own_reads.get(owner, ()) if r in needed]
        for read in found:
            self._require_version(read)
        return [read for read in found if self._position(read) < self._first]

    @cached_property
    def _own_reads(self) -> Mapping[int, list[str]]:
        """By owner, the reads of this worker's replicas whose values no message brings."""
        sent = {access for group in self._read_groups for access in group.of(self._context.worker)}
        found: dict[int, list[str]] = {}
        for name, effect in self._step.graph_index.effects.items():
            captured = self._captured(name)
            if effect.writes or name in self._step.stages.once or captured not in self._order.position:
                continue
            owners = {self._owner[h] for h in effect.reads & self._owner.keys() if (captured, h) not in sent}
            for owner in owners - {self._context.worker}:
                found.setdefault(owner, []).append(name)
        return found

    def _require_version(self, read: str) -> None:
        effect, position = self._step.graph_index.effects[read], self._position(read)
        late = [w for handle in effect.reads for w in self.writes.get(handle, ()) if self._order.position[w] > position]
        if late and position > self._first:
            names = sorted(self._step.by_handle[handle].name for handle in effect.reads)
            raise FetchedElsewhereError(
                f"a fetch reads {', '.join(names)} ({read}) between two parts of a training step, and other workers do "
                "not fetch it in this run. Fetch it on every worker, not only under `if ad.is_chief`."
            )

    def start_signals(self) -> list[StartSignal]:
        """Returns the start signals, in the same order on all workers: of those that send no gradient before a write.

        A step needs them if workers may fetch different outputs: one may still read a variable for its previous step.
        """
        if self._context.reduces_outputs:
            return []
        found: dict[tuple[int, int], list[str]] = {}
        written: set[str] = set()
        for write, handles in self._writes.items():
            owner = self._owner[min(handles)]
            for worker in sorted({*self._context.group.everyone} - {owner}):
                has_gradient = worker in self._context.group and self.gradients_before[write]
                if not has_gradient and not handles <= written:
                    found.setdefault((worker, owner), []).append(write)
            written |= handles
        return [StartSignal(*ends, tuple(writes), self._start_key(writes)) for ends, writes in found.items()]

    def _start_key(self, writes: Iterable[str]) -> str:
        names = sorted({self._step.by_handle[h].name for write in writes for h in self._writes[write]})
        return f"read/{digest(';'.join(names))}/0"

    def _captured(self, name: str) -> str:
        return self._step.replica_of(name)[1]

    def _position(self, name: str) -> int:
        return self._order.position[self._captured(name)]

    @cached_property
    def _first(self) -> int:
        """The position of the first message or write."""
        return min(self._order.position[name] for name in [*self._order.messages, *self._writes])
