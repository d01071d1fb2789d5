"""Variable sync: values that scripts write between steps are sent to all workers; the chief's values win."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from autodist.logs.formatting import some_of
from autodist.placement.synchrony import Synchrony
from autodist.proto import strategy_pb2
from autodist.runtime.batched_transfers import Listing
from autodist.runtime.broadcast import VariableBroadcast
from autodist.runtime.control_messages import ControlMessage
from autodist.runtime.mailbox import Mailbox
from autodist.runtime.variable_slices import VariableSlices
from autodist.runtime.variables import TrackedVariable, VariableTracker
from autodist.runtime.write_consensus import StepAction, WriteConsensus
from autodist.synchronizers import all_synchronizers

log = logging.getLogger("autodist")


class VariableSync:
    """Ensures, around each step, that all workers start from the same variable values.

    Args:
        variable_slices: storage of the values.
        broadcast: broadcasts the chief's values to the other workers.
        tracker: tracker of the script's variables.
        mailbox: delivers control messages; None with one worker.
        guard: wraps calls that may wait for other workers.
        catch_up: updates the script's variable objects.
    """

    def __init__(
        self,
        variable_slices: VariableSlices,
        broadcast: VariableBroadcast,
        tracker: VariableTracker,
        mailbox: Mailbox | None,
        guard: Callable[..., Any],
        catch_up: Callable[[], None],
    ) -> None:
        self._variable_slices, self._broadcast, self._tracker, self._is_chief = (
            variable_slices,
            broadcast,
            tracker,
            broadcast.worker == 0,
        )
        self._guard, self._catch_up = guard, catch_up
        self._consensus: WriteConsensus | None = None
        self._warned: set[str] = set()
        # Written by this worker's script before a step that is void, so that its repetition reports them.
        self._written: dict[TrackedVariable, None] = {}
        if mailbox is not None:
            send = mailbox.open_box(lambda _, message: write_consensus.receive(ControlMessage.decode(message)))
            self._consensus = write_consensus = WriteConsensus(
                broadcast.worker,
                broadcast.workers,
                lambda to, letter: send(to, letter.encode()),
                lambda text: broadcast.receive(Listing.decode(text)),
            )

    def before_step(
        self,
        variables: Iterable[TrackedVariable],
        flush: Callable[[], None],
        is_in_lockstep: bool,
        is_synchronous: bool,
    ) -> StepAction:
        """Sends values written between steps to all workers; returns the action, which shows if the step counts.

        Args:
            variables: variables of the step.
            flush: waits until all writes requested by earlier steps have been applied.
            is_in_lockstep: True if no worker can finish the step before all others have begun it.
            is_synchronous: True if every worker's variables are those of one device between two steps. For variables
                that every worker holds, each then sets those itself that all assign alike, and the chief does not wait
                until the others have received its values.
        """
        self._tracker.compare_aliased()
        ahead = [t for t in variables if t.is_ahead]
        if self._consensus is None:
            if ahead:
                flush()
                self._guard(self._variable_slices.set, ahead, _mark_current)
            return StepAction.STEP
        reset = [t for t in ahead if t.is_reset and t.holder.is_everywhere] if is_synchronous else []
        if reset:
            # Also if this worker has written since: without the chief's value, its session has that of all others.
            values = [t if t.is_alike else _Zero(t) for t in reset]
            self._guard(self._variable_slices.set, values, _mark_current, [self._broadcast.worker])
            ahead = [t for t in ahead if t.is_ahead]
        if self._consensus.begins(bool(ahead)):
            if self._consensus.owes_answers:
                self._guard(self._consensus.answer_waiting)
            return StepAction.STEP
        flush()
        return self._synchronize(self._consensus, ahead, is_in_lockstep, is_synchronous)

    def _synchronize(
        self,
        write_consensus: WriteConsensus,
        ahead: Sequence[TrackedVariable],
        is_in_lockstep: bool,
        is_synchronous: bool,
    ) -> StepAction:
        if self._is_chief:
            self._variable_slices.prepare(ahead, [0])  # overlaps with the wait for other workers
        else:  # before the consensus, so that the chief's values can reuse this worker's memory
            for tracked in ahead:
                tracked.hand_over(is_same=False)
        action, names = self._guard(write_consensus.agree, is_in_lockstep)
        if action is StepAction.PUSH:
            self._guard(self._push, write_consensus, ahead, is_synchronous)
            return StepAction.STEP
        if self._is_chief:
            self._catch_up()  # with the values before the step
            return action
        self._hand_over(names)
        self._written.update(dict.fromkeys(ahead))
        if action is StepAction.STEP:
            self._warn([t for t in self._written if t.shared_name not in names])
            self._written.clear()
        return action

    def _hand_over(self, names: Collection[str]) -> None:
        """Marks the values that the chief has sent as current."""
        for tracked in self._tracker:
            if tracked.shared_name in names:
                tracked.hand_over(is_same=False)

    def _push(self, write_consensus: WriteConsensus, ahead: Sequence[TrackedVariable], is_synchronous: bool) -> None:
        """On the chief, sends its values to all workers; sets those owned by workers that make no more steps itself."""
        listing = Listing.of([t.stored for t in ahead], [0, *write_consensus.present])
        write_consensus.give(listing.encode().decode())
        self._broadcast.send(listing, lambda k: np.asarray(ahead[k].read()))
        absent = [worker for worker in range(1, self._broadcast.workers) if worker not in write_consensus.present]
        self._variable_slices.set(ahead, _mark_current, [0, *absent])
        reads_own_copies = is_synchronous and all(t.holder.is_everywhere for t in ahead)
        write_consensus.pushed([t.shared_name for t in ahead], waits=not reads_own_copies)

    def after_step(self, action: StepAction, written: Iterable[TrackedVariable]) -> bool:
        """Returns True if the step must be repeated with the chief's values.

        Args:
            action: the result of `before_step`.
            written: the variables that the step has written.
        """
        if self._consensus is None:
            return False
        if action is StepAction.VOID and self._is_chief:
            for tracked in written:
                tracked.is_ahead = True
            return True
        return self._consensus.ended()

    @contextmanager
    def waiting_elsewhere(self) -> Iterator[None]:
        """Context of another call in which this worker waits for the chief; see `WriteConsensus.go_away`."""
        if self._consensus is None or self._is_chief:
            yield
            return
        self._guard(self._consensus.go_away)
        try:
            yield
        finally:
            self._hand_over(self._consensus.come_back())

    def close(self) -> None:
        """Announces that this worker's script makes no more steps."""
        if self._consensus is not None:
            self._guard(self._consensus.leave)

    def _warn(self, alone: Sequence[TrackedVariable]) -> None:
        new = [t.source.name.removesuffix(":0") for t in alone if t.shared_name not in self._warned]
        self._warned |= {t.shared_name for t in alone}
        if new:
            log.warning(
                "between steps the script has written %s on this worker and not on the chief. All train on the "
                "chief's values, so the values written here are dropped. Write on every worker, or on the chief.",
                some_of(new),
            )  # fmt: skip


class _Zero:
    """Zero as the value of a variable to which this worker's script has assigned another value since."""

    def __init__(self, tracked: TrackedVariable) -> None:
        self.tracked, self.stored, self.byte_size = tracked, tracked.stored, tracked.byte_size

    def read(self) -> np.ndarray:
        return np.zeros(self.stored.shape, self.stored.dtype.as_numpy_dtype)


def _mark_current(value: TrackedVariable | _Zero) -> None:
    if isinstance(value, _Zero):
        value.tracked.is_reset = False
    else:
        value.hand_over(is_same=True)


def is_in_lockstep(strategy: strategy_pb2.Strategy) -> bool:
    """Returns True if no worker can finish a step before all have begun it; also True for evaluation (no variables)."""
    synchronies = _synchronies(strategy)
    return not synchronies or any(not k.mode.is_alone or k.staleness > 0 for k in synchronies)


def is_synchronous(strategy: strategy_pb2.Strategy) -> bool:
    """Returns True if each step waits for the updates of all workers; also True for evaluation (no variables)."""
    return not any(k.runs_ahead for k in _synchronies(strategy))


def _synchronies(strategy: strategy_pb2.Strategy) -> list[Synchrony]:
    return [synchronizer.synchrony or Synchrony() for _, synchronizer in all_synchronizers(strategy)]
