"""The chief's side of one probe."""

from __future__ import annotations

import contextlib
import queue
import threading
import time

from autodist.cli.checking.protocol import (
    Answer,
    MachineAnswer,
    MachineQuestion,
    Question,
    Reach,
    Reached,
    Tick,
    Tock,
    answer_in,
    line_of,
)
from autodist.cluster.failure import LAST_LINES, why_agent_ended
from autodist.cluster.protocol import Lost, ProtocolError, decode
from autodist.cluster.transport import Channel
from autodist.errors import ClusterError

_END_LIMIT = 2.0
"""Seconds for a probe to end by itself."""


class Conversation:
    """Asks the probe of one machine.

    Args:
        channel: to the probe.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._answers: queue.SimpleQueue[Answer | Lost] = queue.SimpleQueue()
        self._complaints: list[str] = []
        self._complaining = threading.Thread(target=self._read_complaints, name="autodist-probe-errors", daemon=True)
        self._complaining.start()
        self._reading = threading.Thread(target=self._read, name="autodist-probe", daemon=True)
        self._reading.start()

    def __enter__(self) -> Conversation:
        return self

    def __exit__(self, *about: object) -> None:
        """Ends the probe."""
        with contextlib.suppress(OSError, ValueError):
            self._channel.stdin.close()
        self._channel.wait(_END_LIMIT)
        self._channel.close()
        for thread, stream in ((self._reading, self._channel.stdout), (self._complaining, self._channel.stderr)):
            thread.join(_END_LIMIT)
            if not thread.is_alive():
                stream.close()

    def look(self, look: MachineQuestion, limit: float) -> MachineAnswer:
        """What the machine has to say. As for all questions, `limit` is in seconds.

        Raises:
            ClusterError: it cannot be reached, or does not answer.
        """
        answer = self._ask(look, limit)
        assert isinstance(answer, MachineAnswer), "questions are answered one after the other"
        return answer

    def tick(self, limit: float) -> tuple[float, float, float]:
        """Seconds since 1970: when it was asked here, what the machine said, and when that was heard."""
        asked = time.time()
        answer = self._ask(Tick(), limit)
        assert isinstance(answer, Tock), "questions are answered one after the other"
        return asked, answer.at, time.time()

    def reach(self, reach: Reach, limit: float) -> Reached:
        """Which addresses the machine cannot connect to."""
        answer = self._ask(reach, limit)
        assert isinstance(answer, Reached), "questions are answered one after the other"
        return answer

    def _ask(self, question: Question, limit: float) -> Answer:
        with contextlib.suppress(OSError, ValueError):  # that it has ended is read below
            self._channel.stdin.write(line_of(question))
            self._channel.stdin.flush()
        try:
            answer = self._answers.get(timeout=limit)
        except queue.Empty:
            raise ClusterError(
                f"no answer within {limit:g} s; see whether the machine is up and not overloaded, or raise "
                "`reach_timeout`"
            ) from None
        if isinstance(answer, Lost):
            raise ClusterError(answer.problem)
        return answer

    def _read(self) -> None:
        for line in self._channel.stdout:
            said = answer_in(line) or _lost_in(line)
            if said is not None:
                self._answers.put(said)
            elif line.strip():
                self._complaints.append(line.decode(errors="replace").rstrip())
        self._complaining.join(1)
        self._answers.put(Lost(why_agent_ended("\n".join(self._complaints[-LAST_LINES:]))))

    def _read_complaints(self) -> None:
        for line in self._channel.stderr:
            self._complaints.append(line.decode(errors="replace").rstrip())


def _lost_in(line: bytes) -> Lost | None:
    """What the connection to the machine has to say."""
    try:
        message = decode(line)
    except ProtocolError:
        return None
    return message if isinstance(message, Lost) else None
