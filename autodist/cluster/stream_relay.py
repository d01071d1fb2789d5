"""The stream relay: forwards bytes between the chief's process and a command on another machine.

Both ends of the connection send heartbeats, since a cut link does not close it. After the timeout the connection counts
as lost, which the relay reports to the coordinator.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import BinaryIO, Protocol

from autodist.cluster.protocol import Heartbeat, Lost, Message, encode
from autodist.cluster.timeouts import HeartbeatTimeout, heartbeat_interval
from autodist.waits import Event, start_thread


class RemoteCommand(Protocol):
    """A connection to a command on another machine."""

    @property
    def hint_of_silence(self) -> str:
        """The end of a sentence with a further check, for a command that has never sent anything; may be empty."""
        ...

    def send(self, content: bytes) -> None:
        """Sends all bytes; raises OSError if the connection has ended."""
        ...

    def receive(self) -> bytes:
        """Returns some of the command's output; empty bytes when it has ended."""
        ...

    def receive_errors(self) -> bytes:
        """Returns some of its standard error; empty bytes when it has ended, or if standard error is not connected."""
        ...

    def why_ended(self) -> str | None:
        """Returns the reason that the output ended; None if the command itself has ended."""
        ...

    def close(self) -> None:
        """Closes the connection, which ends the command."""
        ...


@dataclass(frozen=True)
class RelayOrder(Message):
    """The order of a relay process.

    Attributes:
        channels: descriptors of the chief's ends of the streams of each command: input, output, errors.
    """

    channels: tuple[tuple[int, int, int], ...] = field(default=(), kw_only=True)


@dataclass(frozen=True)
class ChiefStreams:
    """The chief's ends of one command's streams.

    Attributes:
        incoming: lines for the command.
        outgoing: destination of its output.
        errors: destination of its standard error.
    """

    incoming: BinaryIO
    outgoing: BinaryIO
    errors: BinaryIO

    @staticmethod
    def open(incoming: int, outgoing: int, errors: int) -> ChiefStreams:
        """Opens three file descriptors."""
        return ChiefStreams(os.fdopen(incoming, "rb"), os.fdopen(outgoing, "wb"), os.fdopen(errors, "wb"))

    def send(self, content: bytes) -> None:
        """Sends bytes to the chief, if it still runs."""
        with contextlib.suppress(BrokenPipeError):
            _write(self.outgoing, content)

    def close(self) -> None:
        """Closes both outputs; the thread that forwards `incoming` closes it."""
        for stream in (self.outgoing, self.errors):
            with contextlib.suppress(BrokenPipeError):
                stream.close()


class Relays:
    """The relays of all commands of this process.

    Args:
        all_streams: the chief's ends of the streams of each command.
    """

    def __init__(self, all_streams: Sequence[ChiefStreams]) -> None:
        self._all_streams = all_streams
        self._incoming = [streams.incoming.fileno() for streams in all_streams]
        self._threads: list[threading.Thread] = []

    @property
    def not_started(self) -> int:
        """Number of commands whose relays have not started."""
        return len(self._all_streams) - len(self._threads)

    def start(
        self,
        index: int,
        name: str,
        remote: RemoteCommand,
        timeout: HeartbeatTimeout,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        """Starts to forward bytes, in a thread.

        Args:
            index: index of the command.
            name: name of its machine or process, for messages.
            remote: connection to it.
            timeout: timeout of the connection.
            on_end: called from the thread when either side has ended.
        """

        def run() -> None:
            StreamRelay(name, remote, self._all_streams[index], timeout).run()
            on_end()

        self._threads.append(start_thread(f"relay-{index}", run))

    def send(self, index: int, message: Message) -> None:
        """Sends a message to the chief, in place of a command that was not started."""
        self._all_streams[index].send(encode(message))

    def fail(self, index: int, lost: Lost) -> None:
        """Reports that a command was not started."""
        self._all_streams[index].send(encode(lost))
        self._all_streams[index].close()

    def join(self, limit: float | None = None) -> None:
        """Waits until all started relays have ended, `limit` seconds for each."""
        for thread in self._threads:
            thread.join(limit)

    def wait_for_chief_end(self, seconds: float | None = None) -> bool:
        """Waits until the chief has ended or given up a command; returns False after `seconds`."""
        poll = select.poll()
        for descriptor in self._incoming:
            poll.register(descriptor, 0)  # `poll` always reports that the other end was closed
        return bool(poll.poll(None if seconds is None else seconds * 1000))


class StreamRelay:
    """Forwards bytes between the chief's process and one command on another machine.

    Args:
        host: name of the machine, for messages.
        remote: the connection to the command.
        streams: the chief's ends of the command's streams.
        timeout: timeout of the connection.
    """

    def __init__(self, host: str, remote: RemoteCommand, streams: ChiefStreams, timeout: HeartbeatTimeout) -> None:
        self._host, self._remote, self._streams = host, remote, streams
        self._sending = threading.Lock()
        self._ended = Event()
        self._problem: str | None = None
        self._receiving, self._has_received = True, False
        self._timeout = timeout

    def run(self) -> None:
        """Returns when either side has ended or the connection is lost, after this was sent to the coordinator."""
        errors = start_thread("relayed-errors", self._forward_errors)
        for name, work in {
            "input": self._forward_input,
            "output": self._forward_output,
            "beat": self._send_heartbeats,
        }.items():
            start_thread(f"relayed-{name}", work)
        while not self._ended.wait(self._timeout.poll_interval):
            if not self._receiving:
                self._timeout.restart()
            if self._timeout.has_expired():
                hint = "" if self._has_received else self._remote.hint_of_silence
                self._end(
                    f"nothing was heard from {self._host} for {self._timeout.limit:g} s; check that the machine and "
                    f"the network to it are up{hint}; if the network pauses for longer, raise `silence_timeout`"
                )
        errors.join(1)
        if self._problem is not None:
            self._streams.send(b"\n" + encode(Lost(self._problem, is_away=True)))
        else:
            self._remote.close()  # other commands on the connection continue; if the link is cut, this might block
        self._streams.close()

    def _end(self, problem: str | None) -> None:
        if not self._ended.is_set():
            self._problem = problem
            self._ended.set()

    def _forward_input(self) -> None:
        with self._streams.incoming as lines:
            for line in lines:
                self._send(line)
            self._end(None)

    def _send_heartbeats(self) -> None:
        while not self._ended.wait(heartbeat_interval(self._timeout.limit)):
            self._send(encode(Heartbeat()))

    def _send(self, line: bytes) -> None:
        """Sends a whole line, since two threads send. Blocks if the link is cut and its buffers are full."""
        try:
            with self._sending:
                self._remote.send(line)
        except OSError:
            return  # the channel has ended, which the reading thread handles

    def _forward_output(self) -> None:
        try:
            while received := self._remote.receive():
                # The agent is not silent if the chief does not read the output (its terminal may be halted).
                self._receiving, self._has_received = False, True
                _write(self._streams.outgoing, received)
                self._timeout.restart()
                self._receiving = True
        except OSError as error:
            self._end(f"forwarding the output of {self._host} failed: {error}")
        self._end(self._remote.why_ended())

    def _forward_errors(self) -> None:
        while received := self._remote.receive_errors():
            _write(self._streams.errors, received)


def _write(target: BinaryIO, content: bytes) -> None:
    target.write(content)
    target.flush()
