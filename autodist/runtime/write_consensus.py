"""Variable-write consensus: before each step, workers agree whether the chief must first send variable values to all.

Scripts write variables on every worker, or on one only: `if ad.is_chief: checkpoint.restore(…)`. If no worker has
written a variable, no message is sent. A worker that has written one reports that it is ready, and waits until the
chief has sent its values to all. Meanwhile a worker without writes may have begun the step with old values, and waits
in it for the chief. In that case all workers make the step, which does not count. The chief then sends the values from
before the step, updated with its script's writes, and all workers repeat the step.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence

from autodist.errors import ClusterError
from autodist.runtime.control_messages import ControlKind, ControlMessage
from autodist.waits import Condition

QUERY_AFTER = 1.0
"""Seconds before the chief sends QUERY to late workers, which usually write the same variables as this worker."""

_NEVER = 1 << 62
"""A step number that no worker reaches."""


class StepAction(enum.Enum):
    """The action of a worker for the next step."""

    STEP = "step"
    VOID = "void"  # a step that does not count and is repeated
    PUSH = "push"  # on the chief: all other workers wait for its values


class WriteConsensus:
    """One worker's end of the consensus.

    Args:
        worker: index of this worker.
        workers: number of workers.
        send: sends a control message to some workers.
        take: receives values according to a listing; called on workers other than the chief.

    Attributes:
        present: the workers that wait before the step for the chief's values; used on the chief.
    """

    def __init__(
        self,
        worker: int,
        workers: int,
        send: Callable[[Sequence[int], ControlMessage], None],
        take: Callable[[str], None],
    ) -> None:
        self._worker, self._others, self._send = worker, [w for w in range(workers) if w != worker], send
        self._take = take
        self.present: list[int] = []
        self._announced: list[ControlMessage] = []
        self._changed = Condition()
        self._step = 0
        self._is_within = False
        self._ready_for: int | None = None
        self._wanted: int | None = None
        self._void: int | None = None
        self._again = False
        self._begun = 0
        self._pushed: list[ControlMessage] = []
        self._answers: dict[int, ControlMessage] = {}
        self._waiting: dict[int, int] = {}
        self._left: set[int] = set()
        self._is_away = False

    def go_away(self) -> None:
        """Before another call in which this worker waits for the chief, which may wait for this worker's next step.

        The chief then sets this worker's values itself.
        """
        with self._changed:
            self._is_away = True
            if self._wanted is not None:
                self._send([0], ControlMessage(ControlKind.AWAY, self._wanted, self._worker))

    def come_back(self) -> frozenset[str]:
        """After that call, returns the names of the variables that the chief has set meanwhile."""
        with self._changed:
            self._is_away = False
            if self._wanted is not None and any(message.step >= self._wanted for message in self._pushed):
                self._wanted = None
            return self._take_names()

    def begins(self, has_written: bool) -> bool:
        """Begins the next step unless values must be sent first; returns True if the step has begun.

        Args:
            has_written: True if the script has written a variable of the step.
        """
        with self._changed:
            if has_written or self._wanted is not None:
                return False
            self._begin()
        return True

    @property
    def owes_answers(self) -> bool:
        """On the chief, True if other workers wait for values that will not come."""
        return bool(self._waiting)

    def agree(self, is_in_lockstep: bool) -> tuple[StepAction, frozenset[str]]:
        """Waits, before a step that cannot begin at once, until the workers agree on the next action.

        Args:
            is_in_lockstep: True if no worker can finish a step before all others have begun it.

        Returns:
            The action, and on workers other than the chief, the names of the variables that received the chief's
            values.

        Raises:
            ClusterError: on the chief, that a worker has finished the step without the values that its script wrote.
        """
        return (self._gather(is_in_lockstep), frozenset()) if self._worker == 0 else self._wait_for_chief()

    def give(self, listing: str) -> None:
        """On the chief, announces the values that follow to the waiting workers, which start to receive them."""
        if self.present:
            self._send(self.present, ControlMessage(ControlKind.GIVEN, self._step + 1, 0, listing=listing))

    def pushed(self, names: Sequence[str], waits: bool = True) -> None:
        """On the chief, begins the step, once the values of these variables have been sent to the waiting workers.

        Args:
            names: names of the variables.
            waits: True to begin once all workers have received the values. Otherwise, no worker's step may use the
                values of another worker before that has begun the step.
        """
        with self._changed:
            step = self._step + 1
            if waits:
                self._changed.wait_for(lambda: set(self.present) <= set(self._answered(step, ControlKind.TAKEN)))
            self._answers.clear()
            self._begin()
            # Under the lock: BEGUN, which answers WAITING from now on, would let a worker begin without the values.
            self._send(self._others, ControlMessage(ControlKind.PUSHED, self._step, 0, tuple(names)))

    def ended(self) -> bool:
        """Records the end of the step; returns True if it must be repeated."""
        with self._changed:
            self._is_within = False
            if self._void != self._step:
                return False
            self._void, self._wanted, self._again = None, self._step, True
            self._step -= 1
            return True

    def leave(self) -> None:
        """Announces that this worker makes no more steps, so that no other worker waits for its answers."""
        if self._worker == 0:
            self._send(self._others, ControlMessage(ControlKind.BEGUN, _NEVER, 0))
        else:
            self._send([0], ControlMessage(ControlKind.LEFT, self._step, self._worker))

    def receive(self, message: ControlMessage) -> None:
        """Handles a message of another worker; runs in another thread than the step."""
        answer = None
        with self._changed:
            match message.kind:
                case ControlKind.QUERY:
                    answer = self._answer(message.step)
                case ControlKind.VOID if self._step < message.step or self._is_within_step(message.step):
                    self._void, answer = message.step, ControlKind.VOIDED
                case ControlKind.VOID:
                    answer = ControlKind.BEYOND
                case ControlKind.GIVEN:
                    self._announced.append(message)
                case ControlKind.PUSHED:
                    self._pushed.append(message)
                case ControlKind.BEGUN:
                    self._begun = max(self._begun, message.step)
                case ControlKind.WAITING:
                    self._waiting[message.worker] = message.step
                case ControlKind.LEFT:
                    self._left.add(message.worker)
                case _:
                    self._answers[message.worker] = message
            self._changed.notify_all()
            if answer is not None:  # sent under the lock: the script may be about to send READY, which must come later
                self._send([0], ControlMessage(answer, message.step, self._worker, again=self._again))
        if message.kind == ControlKind.WAITING:
            self.answer_waiting()

    def _is_within_step(self, step: int) -> bool:
        return self._is_within and self._step == step

    def _begin(self) -> None:
        self._step += 1
        self._is_within = True

    def _answer(self, step: int) -> ControlKind:
        """Returns the answer to QUERY: this worker's position relative to a step for which the chief has values."""
        if self._ready_for is not None and step <= self._ready_for:  # a worker that is ahead receives values as well
            return ControlKind.READY
        self._wanted = step
        if self._is_away and not self._is_within:
            return ControlKind.AWAY
        if self._step < step or self._void == step:  # it repeats a step that is void
            return ControlKind.COMING
        return ControlKind.WITHIN if self._is_within_step(step) else ControlKind.BEYOND

    def answer_waiting(self) -> None:
        """Answers the workers that wait for values of the chief that will not come."""
        with self._changed:
            begun = {other: step for other, step in self._waiting.items() if step <= self._step}
            for other in begun:
                del self._waiting[other]
        for other, step in begun.items():
            self._send([other], ControlMessage(ControlKind.BEGUN, step, 0))

    # -- on the chief ----------------------------------------------------------------------------------------------

    def _gather(self, is_in_lockstep: bool) -> StepAction:
        step = self._step + 1
        with self._changed:
            self._changed.wait_for(lambda: not self._missing(step, ControlKind.READY), QUERY_AFTER)
            late = self._missing(step, ControlKind.READY)
        if late:
            self._send(late, ControlMessage(ControlKind.QUERY, step, 0))
        ahead = (ControlKind.WITHIN, ControlKind.BEYOND) if is_in_lockstep else ()
        with self._changed:
            # A worker that is away comes to a step in lockstep, and then reads the values of before until it does.
            here = (ControlKind.READY,) if is_in_lockstep else (ControlKind.READY, ControlKind.AWAY)
            coming = (ControlKind.COMING, ControlKind.AWAY)
            self._changed.wait_for(lambda: not self._missing(step, *here, *coming, *ahead))
            if not self._answered(step, *ahead):
                self._changed.wait_for(lambda: not self._missing(step, *here))
                self.present = [other for other in self._answered(step, ControlKind.READY) if other not in self._left]
                self.present.sort()
                self._answers.clear()
                self._again = False
                return StepAction.PUSH
        self._require_within(step)
        self._send(self._others, ControlMessage(ControlKind.VOID, step, 0))
        with self._changed:
            self._changed.wait_for(lambda: not self._missing(step, ControlKind.VOIDED, ControlKind.BEYOND))
        self._require_within(step)
        with self._changed:
            self._answers.clear()
            self._again = True
        return StepAction.VOID

    def _require_within(self, step: int) -> None:
        beyond = self._answered(step, ControlKind.BEYOND)
        if beyond:
            raise ClusterError(
                f"the chief's script wrote variables before a step that worker {min(beyond)} has made without them. "
                "Write them on every worker, not under `if ad.is_chief`; all workers receive the chief's value."
            )

    def _answered(self, step: int, *kinds: ControlKind) -> list[int]:
        answers = {w: one for w, one in self._answers.items() if one.step == step and one.kind in kinds}
        return [w for w, one in answers.items() if one.kind != ControlKind.READY or one.again == self._again]

    def _missing(self, step: int, *kinds: ControlKind) -> list[int]:
        answered = self._answered(step, *kinds)
        return [w for w in self._others if w not in answered and w not in self._left]

    # -- on the others ---------------------------------------------------------------------------------------------

    def _wait_for_chief(self) -> tuple[StepAction, frozenset[str]]:
        with self._changed:
            step = self._step + 1 if self._wanted is None else self._wanted
            self._ready_for = step
            if self._void is None:  # else the chief knows: READY would replace VOIDED, for which it may still wait
                self._send([0], ControlMessage(ControlKind.READY, step, self._worker, again=self._again))
            is_clear = self._changed.wait_for(lambda: self._announced or self._is_clear(step), QUERY_AFTER)
        if not is_clear:
            self._send([0], ControlMessage(ControlKind.WAITING, step, self._worker))
        while self._has_values(step):
            announcement = self._announced.pop(0)
            self._take(announcement.listing)
            self._send([0], ControlMessage(ControlKind.TAKEN, announcement.step, self._worker))
        with self._changed:
            self._ready_for, self._again = None, False
            self._wanted = None if self._wanted == step else self._wanted  # the chief may have values for the next step
            names = self._take_names()
            self._begin()
            return (StepAction.STEP if self._void is None else StepAction.VOID), names

    def _take_names(self) -> frozenset[str]:
        names = frozenset(name for message in self._pushed for name in message.names)
        self._pushed.clear()
        return names

    def _has_values(self, step: int) -> bool:
        """Returns True if values follow, once the next action is known."""
        with self._changed:
            self._changed.wait_for(lambda: self._announced or self._is_clear(step))
            return bool(self._announced)

    def _is_clear(self, step: int) -> bool:
        return self._void is not None or self._begun >= step or any(p.step >= step for p in self._pushed)
