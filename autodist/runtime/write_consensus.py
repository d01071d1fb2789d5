"""Accord: before each step, whether the chief has values for all workers that its script wrote since the last one.

Scripts write variables on every worker alike, or on one alone: `if ad.is_chief: checkpoint.restore(…)`. Nothing is sent
for a step before which nothing was written. Where something was, a worker says that it is ready and stands still till
the chief has given its values to all. A worker that knows of nothing has gone into the step by then, with old values,
and waits there for the chief: then all make that step, for nothing, the chief gives out what the variables were before
it, with what its script wrote, and all make it again.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Sequence

from autodist.errors import ClusterError
from autodist.runtime.control_messages import ControlKind, ControlMessage

PATIENCE = 1.0
"""Seconds to wait for the others, which mostly write what this worker wrote, before they are asked."""

_NEVER = 1 << 62
"""The step that no worker reaches."""


class Turn(enum.Enum):
    """What a worker does with the step that comes next."""

    STEP = "step"
    VOID = "void"  # the step, which all make again
    PUSH = "push"  # on the chief: all others stand still


class WriteConsensus:
    """One worker's side.

    Args:
        worker: its index.
        workers: how many there are.
        send: brings a letter to some workers.
        take: on another worker than the chief, takes values that come as listed.

    Attributes:
        present: on the chief, the workers that wait before the step to be given its values.
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
        self._given: list[ControlMessage] = []
        self._changed = threading.Condition()
        self._step = 0
        self._is_within = False
        self._stands_still = False
        self._wanted: int | None = None
        self._void: int | None = None
        self._again = False
        self._begun = 0
        self._pushed: list[ControlMessage] = []
        self._heard: dict[int, ControlMessage] = {}
        self._waiting: dict[int, int] = {}
        self._left: set[int] = set()

    def begins(self, has_written: bool) -> bool:
        """Begins the next step, unless this worker knows that values have to be given first; says whether it did.

        Args:
            has_written: whether the script has written a variable of the step.
        """
        with self._changed:
            if has_written or self._wanted is not None:
                return False
            self._begin()
        return True

    @property
    def owes_answers(self) -> bool:
        """On the chief: whether others wait in vain for values."""
        return bool(self._waiting)

    def agree(self, keeps_pace: bool) -> tuple[Turn, frozenset[str]]:
        """Waits, before a step that does not just begin, till it is clear what comes first.

        Args:
            keeps_pace: whether nobody can end a step that another has not begun.

        Returns:
            What to do, and on another worker than the chief, which variables the chief has given values.

        Raises:
            ClusterError: on the chief: a worker has made the step without what the chief's script wrote.
        """
        return (self._gather(keeps_pace), frozenset()) if self._worker == 0 else self._follow()

    def give(self, listing: str) -> None:
        """On the chief: tells the workers that wait which values come, which they take from now on."""
        if self.present:
            self._send(self.present, ControlMessage(ControlKind.GIVEN, self._step + 1, 0, listing=listing))

    def pushed(self, names: Sequence[str]) -> None:
        """On the chief: begins the step, once the workers that were given these variables' values have them."""
        with self._changed:
            step = self._step + 1
            self._changed.wait_for(lambda: set(self.present) <= set(self._that_said(step, ControlKind.TAKEN)))
            self._heard.clear()
            self._begin()
            letter = ControlMessage(ControlKind.PUSHED, self._step, 0, tuple(names))
        self._send(self._others, letter)

    def ended(self) -> bool:
        """Notes that the step has ended, and says whether it has to be made again."""
        with self._changed:
            self._is_within = False
            if self._void != self._step:
                return False
            self._void, self._wanted, self._again = None, self._step, True
            self._step -= 1
            return True

    def leave(self) -> None:
        """This worker makes no more steps: nobody is to wait for what it would say."""
        if self._worker == 0:
            self._send(self._others, ControlMessage(ControlKind.BEGUN, _NEVER, 0))
        else:
            self._send([0], ControlMessage(ControlKind.LEFT, self._step, self._worker))

    def receive(self, letter: ControlMessage) -> None:
        """Takes in what another worker says; in another thread than the step's."""
        answer = None
        with self._changed:
            match letter.subject:
                case ControlKind.ASKED:
                    answer = self._answer(letter.step)
                case ControlKind.VOID if self._step < letter.step or self._is_within_step(letter.step):
                    self._void, answer = letter.step, ControlKind.VOIDED
                case ControlKind.VOID:
                    answer = ControlKind.BEYOND
                case ControlKind.GIVEN:
                    self._given.append(letter)
                case ControlKind.PUSHED:
                    self._pushed.append(letter)
                case ControlKind.BEGUN:
                    self._begun = max(self._begun, letter.step)
                case ControlKind.WAITING:
                    self._waiting[letter.worker] = letter.step
                case ControlKind.LEFT:
                    self._left.add(letter.worker)
                case _:
                    self._heard[letter.worker] = letter
            self._changed.notify_all()
            again = self._again
        if answer is not None:
            self._send([0], ControlMessage(answer, letter.step, self._worker, again=again))
        if letter.subject == ControlKind.WAITING:
            self.answer_waiting()

    def _is_within_step(self, step: int) -> bool:
        return self._is_within and self._step == step

    def _begin(self) -> None:
        self._step += 1
        self._is_within = True

    def _answer(self, step: int) -> ControlKind:
        """Whether this worker comes to a step before which the chief has values to give."""
        if self._stands_still:
            return ControlKind.READY
        self._wanted = step
        if self._step < step:
            return ControlKind.COMING
        return ControlKind.WITHIN if self._is_within_step(step) else ControlKind.BEYOND

    def answer_waiting(self) -> None:
        """Tells those that wait for the chief's values in vain."""
        with self._changed:
            told = {other: step for other, step in self._waiting.items() if step <= self._step}
            for other in told:
                del self._waiting[other]
        for other, step in told.items():
            self._send([other], ControlMessage(ControlKind.BEGUN, step, 0))

    # -- on the chief ----------------------------------------------------------------------------------------------

    def _gather(self, keeps_pace: bool) -> Turn:
        step = self._step + 1
        with self._changed:
            self._changed.wait_for(lambda: not self._yet_to_say(step, ControlKind.READY), PATIENCE)
            late = self._yet_to_say(step, ControlKind.READY)
        if late:
            self._send(late, ControlMessage(ControlKind.ASKED, step, 0))
        ahead = (ControlKind.WITHIN, ControlKind.BEYOND) if keeps_pace else ()
        with self._changed:
            self._changed.wait_for(lambda: not self._yet_to_say(step, ControlKind.READY, ControlKind.COMING, *ahead))
            if not self._that_said(step, *ahead):
                self._changed.wait_for(lambda: not self._yet_to_say(step, ControlKind.READY))
                self.present = [other for other in self._others if other not in self._left]
                self._heard.clear()
                self._again = False
                return Turn.PUSH
        self._require_within(step)
        self._send(self._others, ControlMessage(ControlKind.VOID, step, 0))
        with self._changed:
            self._changed.wait_for(lambda: not self._yet_to_say(step, ControlKind.VOIDED, ControlKind.BEYOND))
        self._require_within(step)
        with self._changed:
            self._heard.clear()
            self._again = True
        return Turn.VOID

    def _require_within(self, step: int) -> None:
        beyond = self._that_said(step, ControlKind.BEYOND)
        if beyond:
            raise ClusterError(
                f"the chief's script wrote variables before a step that worker {min(beyond)} has made without them. "
                "Write them on every worker alike, not under `if ad.is_chief`; the chief's value is what all get."
            )

    def _that_said(self, step: int, *kinds: ControlKind) -> list[int]:
        said = {w: one for w, one in self._heard.items() if one.step == step and one.subject in kinds}
        return [w for w, one in said.items() if one.subject != ControlKind.READY or one.again == self._again]

    def _yet_to_say(self, step: int, *kinds: ControlKind) -> list[int]:
        said = self._that_said(step, *kinds)
        return [w for w in self._others if w not in said and w not in self._left]

    # -- on the others ---------------------------------------------------------------------------------------------

    def _follow(self) -> tuple[Turn, frozenset[str]]:
        with self._changed:
            step = self._step + 1 if self._wanted is None else self._wanted
            self._stands_still = True
        self._send([0], ControlMessage(ControlKind.READY, step, self._worker, again=self._again))
        with self._changed:
            is_clear = self._changed.wait_for(lambda: self._given or self._is_clear(step), PATIENCE)
        if not is_clear:
            self._send([0], ControlMessage(ControlKind.WAITING, step, self._worker))
        while self._has_to_take(step):
            given = self._given.pop(0)
            self._take(given.listing)
            self._send([0], ControlMessage(ControlKind.TAKEN, given.step, self._worker))
        with self._changed:
            self._stands_still, self._wanted, self._again = False, None, False
            names = frozenset(name for letter in self._pushed for name in letter.names)
            self._pushed.clear()
            self._begin()
            return (Turn.STEP if self._void is None else Turn.VOID), names

    def _has_to_take(self, step: int) -> bool:
        """Whether values come first, once it is clear what comes."""
        with self._changed:
            self._changed.wait_for(lambda: self._given or self._is_clear(step))
            return bool(self._given)

    def _is_clear(self, step: int) -> bool:
        return self._void is not None or self._begun >= step or any(p.step >= step for p in self._pushed)
