"""Exchanges messages with an agent, or with the probe of `autodist check`, over a channel."""

from __future__ import annotations

import collections
import contextlib
import queue
import threading
import time
from abc import ABC, abstractmethod
from typing import Self, TypeVar

from autodist.cluster.failure import LAST_LINES, why_agent_ended
from autodist.cluster.protocol import Lost, Message, ProtocolError, decode, encode
from autodist.cluster.transport import Channel
from autodist.errors import ClusterError
from autodist.waits import start_thread

_Answer = TypeVar("_Answer", bound=Message)

_END_LIMIT = 2.0
"""Seconds for an agent that answers requests to end on its own."""

_LAST_WORDS_LIMIT = 5.0
"""Seconds for reading the last messages of an agent that has ended."""


class AgentConnection(ABC):
    """Sends messages to an agent, and reads its messages in a thread, which the constructor starts.

    Args:
        name: name of the threads.
        channel: channel to the agent.
    """

    def __init__(self, name: str, channel: Channel) -> None:
        self._channel = channel
        self._sending = threading.Lock()
        self._other_lines: collections.deque[str] = collections.deque(maxlen=LAST_LINES)
        self._error_reader = start_thread(f"{name}-errors", self._read_errors)
        self._reader = start_thread(name, self._read)

    @abstractmethod
    def _handle(self, message: Message) -> None:
        """Handles a message, in the thread that reads.

        The last message, after the agent has ended, is a `Lost` with the error output of the agent and of its login,
        such as a greeting.
        """

    def send(self, message: Message) -> None:
        """Sends a message; the reading thread detects that the agent is gone."""
        with contextlib.suppress(OSError, ValueError), self._sending:  # ValueError: closed by `close`
            self._channel.stdin.write(encode(message))
            self._channel.stdin.flush()

    def end_input(self) -> None:
        """Closes the agent's standard input, at which the agent ends."""
        with contextlib.suppress(OSError, ValueError):
            self._channel.stdin.close()

    def wait(self, timeout: float) -> bool:
        """Waits until the agent's process has ended, or `timeout` seconds; returns True if it has ended."""
        return self._channel.wait(timeout) is not None

    def close(self) -> None:
        """Kills the agent's process if it still runs, and handles its last messages."""
        self._channel.close()
        for thread, stream in ((self._reader, self._channel.stdout), (self._error_reader, self._channel.stderr)):
            thread.join(_LAST_WORDS_LIMIT)
            if not thread.is_alive():
                stream.close()

    def _read(self) -> None:
        try:
            for line in self._channel.stdout:
                try:
                    message = decode(line)
                except ProtocolError:
                    self._keep(line)
                else:
                    self._handle(message)
        finally:
            self._error_reader.join(1)
            self._handle(self._lost("\n".join(self._other_lines)))

    def _lost(self, output: str) -> Lost:
        """Returns the last message of an agent that has ended without one, from its error output."""
        return Lost(why_agent_ended(output))

    def _read_errors(self) -> None:
        for line in self._channel.stderr:
            self._keep(line)

    def _keep(self, line: bytes) -> None:
        if line.strip():
            self._other_lines.append(line.decode(errors="replace").rstrip())


class RequestConnection(AgentConnection):
    """A connection to an agent that answers requests; as a context manager, it ends the agent at its exit."""

    def __init__(self, name: str, channel: Channel) -> None:
        self._answers: queue.SimpleQueue[Message] = queue.SimpleQueue()
        super().__init__(name, channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *about: object) -> None:
        self.end_input()
        self.wait(_END_LIMIT)
        self.close()

    def next_answer(self, kind: type[_Answer], limit: float, option: str = "reach_timeout") -> _Answer:
        """Returns the next message of a kind, and drops others, such as heartbeats.

        Args:
            kind: the class of the message.
            limit: seconds to wait for it.
            option: the option of the YAML from which the limit follows.

        Raises:
            ClusterError: the machine cannot be reached, or sends no such message for `limit` seconds.
        """
        deadline = time.monotonic() + limit
        while True:
            try:
                answer = self._answers.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise ClusterError(
                    f"no answer within {limit:g} s; check that the machine is up and not overloaded, or raise "
                    f"`{option}`"
                ) from None
            if isinstance(answer, Lost):
                raise ClusterError(answer.problem)
            if isinstance(answer, kind):
                return answer

    def _handle(self, message: Message) -> None:
        self._answers.put(message)
