"""Collective call matching: decides if all workers make a call together, such as an evaluation, or each caller alone.

A script evaluates on every worker, or on one only: `if ad.is_chief: model.evaluate(…)`. A worker that makes such a call
notifies the chief, and the chief decides. A worker that reaches another collective call first, such as a step, or the
end of its script, does not take part. The chief queries workers that have sent no message. If a worker does neither
within a time limit, the callers make the call alone, which is slower and has the same result.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autodist.json_record import JSONRecord
from autodist.waits import Condition

TIME_LIMIT = 30.0
"""Seconds to wait for workers that neither make the call nor reach another one, unless all are known to make it."""

QUERY_AFTER = 0.02
"""Seconds before the chief queries other workers, which usually make the same call."""

_END = 1 << 62
"""A position that no worker passes."""


class CallMessageKind(enum.StrEnum):
    """The meaning of a message."""

    CALLING = "calling"  # to the chief: this worker makes a call
    GIVES_UP = "gives up"  # to the chief: the time limit is over; make the call alone, unless already decided
    QUERY = "query"  # from the chief: does the worker make a call before its next collective call?
    PASSED = "passed"  # to the chief: the sender is at a later call; from the chief: it makes no more calls
    TOGETHER = "together"  # from the chief: all workers make the call
    ALONE = "alone"  # from the chief: the worker makes the call alone


@dataclass(frozen=True)
class Call:
    """A call that workers may make together.

    Attributes:
        what: name of the call. A worker that makes another call may still reach this one.
        data: digest of its data; only calls with equal data are made together.
        is_required: True if no worker can make it alone. The chief then first lets workers make other calls alone.
    """

    what: str
    data: str = ""
    is_required: bool = False


@dataclass(frozen=True)
class CallMessage(JSONRecord):
    """A message about calls from one worker to another.

    Attributes:
        kind: meaning of the message.
        worker: the sender.
        position: number of collective calls that the sender had reached.
        call: the call.
        number: number of the call, counted on the worker that makes it.
    """

    kind: CallMessageKind
    worker: int
    position: int
    call: Call | None = None
    number: int = 0


class CallMatching:
    """One worker's end of call matching.

    Args:
        worker: index of this worker; 0 is the chief.
        workers: number of workers.
        send: sends a message to some workers.

    Attributes:
        reached: number of collective calls that this worker has reached.
    """

    def __init__(self, worker: int, workers: int, send: Callable[[Sequence[int], CallMessage], None]) -> None:
        self._worker, self._others, self._send = worker, [w for w in range(workers) if w != worker], send
        self._changed = Condition()
        self.reached = self._position = 0
        self._number = 0
        self._queried_at: int | None = None
        self._decided: dict[int, bool] = {}
        self._open: dict[int, CallMessage] = {}
        self._passed: dict[int, int] = {}
        self._owed: list[tuple[int, CallMessage]] = []

    def reach_collective(self) -> bool:
        """Records that this worker reaches a collective call, such as a step; it cannot match older calls any more.

        Returns:
            True if other workers wait for `answer`.
        """
        self.reached += 1
        self._advance(self._position + 1)
        return bool(self._owed)

    def answer(self) -> None:
        """Sends PASSED or ALONE to the workers that wait for an answer."""
        with self._changed:
            owed, self._owed = self._owed, []
        for to, message in owed:
            self._send([to], message)

    def leave(self) -> None:
        """Announces that this worker's script makes no more calls."""
        self._advance(_END)
        self.answer()
        self._send(self._others if self._worker == 0 else [0], self._message(CallMessageKind.PASSED))

    def are_made_together(self, call: Call, is_certain: bool = False) -> bool:
        """Returns True if all workers make this call; waits until that is decided.

        Args:
            call: this worker's call.
            is_certain: True if all workers are known to reach it, so that there is no time limit.
        """
        limit = None if is_certain else TIME_LIMIT
        return self._gather(call, limit) if self._worker == 0 else self._request(call, limit)

    def have_all_left(self) -> bool:
        """On the chief, returns True if all others make no more calls; waits for their messages within a time limit."""
        self._query()
        with self._changed:
            self._changed.wait_for(lambda: not self._silent(), TIME_LIMIT)
            return all(self._passed.get(worker) == _END for worker in self._others)

    def receive(self, message: CallMessage) -> None:
        """Handles a message from another worker; not called in the script's thread."""
        answer = None
        with self._changed:
            match message.kind:
                case CallMessageKind.CALLING if self._position <= message.position:
                    self._open[message.worker] = message
                case CallMessageKind.CALLING:
                    answer = self._message(CallMessageKind.ALONE, number=message.number)
                case CallMessageKind.GIVES_UP if self._is_open(message):
                    del self._open[message.worker]
                    answer = self._message(CallMessageKind.ALONE, number=message.number)
                case CallMessageKind.PASSED:
                    self._passed[message.worker] = max(message.position, self._passed.get(message.worker, 0))
                case CallMessageKind.QUERY if self._position > message.position:
                    answer = self._message(CallMessageKind.PASSED)
                case CallMessageKind.QUERY:
                    self._queried_at = message.position
                case CallMessageKind.TOGETHER | CallMessageKind.ALONE:
                    self._decided[message.number] = message.kind is CallMessageKind.TOGETHER
            self._changed.notify_all()
        if answer is not None:
            self._send([message.worker], answer)

    def _message(self, kind: CallMessageKind, call: Call | None = None, number: int = 0) -> CallMessage:
        return CallMessage(kind, self._worker, self._position, call, number)

    def _is_open(self, message: CallMessage) -> bool:
        return message.worker in self._open and self._open[message.worker].number == message.number

    def _advance(self, position: int) -> None:
        with self._changed:
            self._position = position
            late = [self._open.pop(w) for w in sorted(self._open) if self._open[w].position < position]
            self._owed += [(n.worker, self._message(CallMessageKind.ALONE, number=n.number)) for n in late]
            if self._queried_at is not None and self._queried_at < position:
                self._queried_at = None
                self._owed.append((0, self._message(CallMessageKind.PASSED)))

    # -- on the chief ----------------------------------------------------------------------------------------------

    def _gather(self, call: Call, limit: float | None) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: not self._silent(), QUERY_AFTER)
            own = self._message(CallMessageKind.CALLING, call)
        self._query()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: not self._silent(), limit)
                # A call that a worker makes before this one, and the chief does not make.
                early = self._making_another(own) if call.is_required else []
                callers = early or [w for w in self._others if w in self._open and _matches(self._open[w], own)]
                are_all = callers == self._others and all(self._open[w].call == call for w in callers)
                kind = CallMessageKind.TOGETHER if are_all else CallMessageKind.ALONE
                answers = [(w, self._message(kind, number=self._open.pop(w).number)) for w in callers]
            for to, message in answers:
                self._send([to], message)
            if not early:
                return are_all
            self._query()

    def _query(self) -> None:
        """Queries the workers that have sent no message about the chief's position or a later one."""
        with self._changed:
            silent, query = self._silent(), self._message(CallMessageKind.QUERY)
        if silent:
            self._send(silent, query)

    def _making_another(self, own: CallMessage) -> list[int]:
        """Returns the workers that make another call than the chief at the same position, and can make it alone."""
        others = [w for w, one in self._open.items() if one.position == own.position and not _matches(one, own)]
        return [w for w in others if (call := self._open[w].call) is not None and not call.is_required]

    def _silent(self) -> list[int]:
        return [w for w in self._others if w not in self._open and self._passed.get(w, 0) <= self._position]

    # -- on the others ---------------------------------------------------------------------------------------------

    def _request(self, call: Call, limit: float | None) -> bool:
        with self._changed:
            self._number += 1
            number, calling = self._number, self._message(CallMessageKind.CALLING, call, self._number)
            gives_up = self._message(CallMessageKind.GIVES_UP, call, number)
        self._send([0], calling)
        with self._changed:
            is_decided = self._changed.wait_for(lambda: self._is_clear(number), limit)
        if not is_decided:
            self._send([0], gives_up)
        with self._changed:
            self._changed.wait_for(lambda: self._is_clear(number))
            return self._decided.pop(number, False)

    def _is_clear(self, number: int) -> bool:
        return number in self._decided or 0 in self._passed


def _matches(one: CallMessage, other: CallMessage) -> bool:
    """Returns True if two workers make the same call at the same position, possibly with different data."""
    calls = one.call is not None and other.call is not None and one.call.what == other.call.what
    return calls and one.position == other.position
