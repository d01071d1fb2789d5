"""The coordinator's side of one worker: its channel, and what is known of it."""

from __future__ import annotations

import collections
import logging
import threading
from collections.abc import Callable

from autodist.cluster.failure import LAST_LINES, Ending, exit_reason, why_agent_ended
from autodist.cluster.output import Output
from autodist.cluster.protocol import (
    Done,
    Exited,
    Facts,
    Joined,
    Leaving,
    Line,
    Lost,
    Message,
    Progress,
    ProtocolError,
    decode,
    encode,
)
from autodist.cluster.transport import Channel
from autodist.logs.tensorflow_log import says_nothing, tells_of_no_failure

_log = logging.getLogger("autodist.cluster")

_LAST_WORDS_LIMIT = 5.0
"""Seconds for reading what an agent that has ended said before."""


class WorkerConnection:
    """One worker, as the coordinator knows it.

    All fields below change under `changed`, which is notified then.

    Args:
        name: of the worker.
        channel: to its agent.
        changed: shared by all links of a run.
        output: where its lines go.
        on_end: called under `changed`, once, when it has ended (badly or not).
        on_leaving: called with its name when SIGTERM has come to it, from a thread of the link's.
        shows: whether its lines are shown here; a scheduler that has started the worker keeps them itself.

    Attributes:
        answer: to `Inspect`; None until it is there.
        joined: whether the script has made contact.
        done: whether the script has reported that it is done.
        progress: answer to the last `Ask`; None until it is there.
        ending: how it ended; None while it runs.
        is_leaving: whether SIGTERM has come to it.
        status: exit status of the script, if it is known.
    """

    def __init__(
        self,
        name: str,
        channel: Channel,
        changed: threading.Condition,
        output: Output,
        on_end: Callable[[WorkerConnection], None],
        on_leaving: Callable[[str], None],
        shows: bool = True,
    ) -> None:
        self.name = name
        self.answer: Facts | Lost | None = None
        self.joined = self.done = self.is_leaving = False
        self.progress: Progress | None = None
        self.ending: Ending | None = None
        self.status: int | None = None
        self._channel, self._changed, self._output, self._on_end = channel, changed, output, on_end
        self._on_leaving = on_leaving
        self._shows = shows
        self._is_heard = True
        self._sending = threading.Lock()
        self._lines: collections.deque[str] = collections.deque(maxlen=LAST_LINES)
        self._complaints: collections.deque[str] = collections.deque(maxlen=LAST_LINES)
        self._complaining = threading.Thread(target=self._read_complaints, name=f"autodist-{name}-errors", daemon=True)
        self._complaining.start()
        self._reading = threading.Thread(target=self._read, name=f"autodist-{name}", daemon=True)
        self._reading.start()

    @property
    def last_lines(self) -> tuple[str, ...]:
        """That the worker printed, without what TensorFlow logs beside."""
        return tuple(self._lines)

    def send(self, message: Message) -> None:
        """Tells the agent something. That it is gone is learnt from the reading side."""
        try:
            with self._sending:
                self._channel.stdin.write(encode(message))
                self._channel.stdin.flush()
        except (OSError, ValueError):  # ValueError: closed by `close`
            return

    def take_heard(self) -> bool:
        """Returns True if the agent has sent something since the last call, or sends no heartbeats."""
        is_heard, self._is_heard = self._is_heard, not self._channel.beats
        return is_heard

    def wait(self, timeout: float) -> bool:
        """Waits until the agent's process has ended, and says whether it has."""
        return self._channel.wait(timeout) is not None

    def close(self) -> None:
        """Ends the agent's process, if it still runs, and hands over what it has said."""
        self._channel.close()
        self._reading.join(_LAST_WORDS_LIMIT)

    def _read(self) -> None:
        try:
            for line in self._channel.stdout:
                self._handle(line)
        finally:
            self._complaining.join(1)
            with self._changed:
                self._end(Lost(why_agent_ended("\n".join(self._complaints))))
                self._changed.notify_all()

    def _handle(self, line: bytes) -> None:
        self._is_heard = True
        try:
            message = decode(line)
        except ProtocolError:
            # A machine's login may print a greeting; it belongs to what the machine says of itself.
            self._complaints.append(line.decode(errors="replace").rstrip())
            return
        if isinstance(message, Line):
            if says_nothing(message.text) and not _log.isEnabledFor(logging.DEBUG):
                return
            if self._shows:
                self._output.line(message.stream, self.name, message.text)
        with self._changed:
            is_new = isinstance(message, Leaving) and not self.is_leaving
            self._note(message)
            self._changed.notify_all()
        if is_new:
            self._on_leaving(self.name)

    def _note(self, message: Message) -> None:
        match message:
            case Line():
                if not tells_of_no_failure(message.text):
                    self._lines.append(message.text)
            case Facts():
                self.answer = message
            case Joined():
                self.joined = True
            case Leaving():
                self.is_leaving = True
            case Done():
                self.done = True
            case Progress():
                self.progress = message
            case Exited():
                self.status = message.status
                self._end(message)
            case Lost():
                self._end(message)

    def _end(self, message: Exited | Lost) -> None:
        if self.ending is not None:
            return
        if isinstance(message, Exited):
            reason = exit_reason(message.status, self.joined, self.done)
            self.ending = Ending(self.name, reason, self.last_lines)
        else:
            self.answer = self.answer or message
            self.ending = Ending(self.name, f"was lost: {message.problem}", self.last_lines, is_lost=True)
        self._on_end(self)

    def _read_complaints(self) -> None:
        for line in self._channel.stderr:
            self._complaints.append(line.decode(errors="replace").rstrip())
