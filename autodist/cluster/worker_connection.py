"""The worker connection: represents one worker in the coordinator."""

from __future__ import annotations

import collections
import logging
import threading
from collections.abc import Callable

from autodist.cluster.agent_connection import AgentConnection
from autodist.cluster.failure import LAST_LINES, Ending, exit_reason
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
)
from autodist.cluster.transport import Channel
from autodist.logs.tensorflow_log import is_no_failure, is_routine_line

_log = logging.getLogger("autodist.cluster")


class WorkerConnection(AgentConnection):
    """The channel to one worker's agent, and the state of the worker.

    All attributes change under `changed`, which is then notified.

    Args:
        name: name of the worker.
        channel: channel to its agent.
        changed: condition shared by all connections of a run.
        output: destination of its lines.
        on_end: called under `changed`, once, when the worker has ended.
        on_leaving: called with the worker's name when it received SIGTERM, from a thread of the connection.
        shows: True if its lines are printed; a scheduler that has started the worker collects them itself.

    Attributes:
        answer: answer to `Inspect`; None until it arrives.
        joined: True if the script has joined the run.
        done: True if the script has reported that it is done.
        progress: answer to the last `ProgressRequest`; None until it arrives.
        ending: end of the worker; None while it runs.
        is_leaving: True if the worker received SIGTERM.
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
        self._changed, self._output, self._on_end, self._on_leaving = changed, output, on_end, on_leaving
        self._shows = shows
        self._has_sent = True
        self._lines: collections.deque[str] = collections.deque(maxlen=LAST_LINES)
        super().__init__(name, channel)

    @property
    def last_lines(self) -> tuple[str, ...]:
        """The last lines that the worker printed, without TensorFlow's unrelated log lines."""
        return tuple(self._lines)

    def take_senders(self) -> bool:
        """Returns True if the agent has sent something since the last call, or sends no heartbeats."""
        has_sent, self._has_sent = self._has_sent, not self._channel.sends_heartbeats
        return has_sent

    def _handle(self, message: Message) -> None:
        self._has_sent = True
        if isinstance(message, Line):
            if is_routine_line(message.text) and not _log.isEnabledFor(logging.DEBUG):
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
                if not is_no_failure(message.text):
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
