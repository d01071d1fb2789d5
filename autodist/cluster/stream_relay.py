"""Passing bytes between the chief's process and a command on another machine, in a process beside the chief's."""

from __future__ import annotations

import contextlib
import os
import threading
from dataclasses import dataclass
from typing import BinaryIO, Protocol

from autodist.cluster.heartbeat_timeout import HeartbeatTimeout, beat_interval
from autodist.cluster.protocol import Heartbeat, Lost, encode


class Far(Protocol):
    """A connection to a command on another machine."""

    def send(self, content: bytes) -> None:
        """Sends all of it; raises OSError where the connection has ended."""
        ...

    def receive(self) -> bytes:
        """Some of what the command says; nothing when it has ended."""
        ...

    def receive_errors(self) -> bytes:
        """Some of what it says on standard error; nothing when it has ended, or if that does not come here."""
        ...

    def why_ended(self) -> str | None:
        """Why nothing more comes, where that is not the command's own end."""
        ...

    def close(self) -> None:
        """Ends the connection, and with it the command."""
        ...


@dataclass(frozen=True)
class Ends:
    """The chief's ends of one command's streams.

    Attributes:
        incoming: lines for the command.
        outgoing: where its output goes.
        errors: where its standard error goes.
    """

    incoming: BinaryIO
    outgoing: BinaryIO
    errors: BinaryIO

    @staticmethod
    def of(incoming: int, outgoing: int, errors: int) -> Ends:
        """The ends that file descriptors stand for."""
        return Ends(os.fdopen(incoming, "rb"), os.fdopen(outgoing, "wb"), os.fdopen(errors, "wb"))

    def tell(self, content: bytes) -> None:
        """Says something to the chief, if it is there."""
        with contextlib.suppress(BrokenPipeError):
            _write(self.outgoing, content)

    def close(self) -> None:
        """Nothing more comes; the lines for the command are closed by the thread that passes them on."""
        for stream in (self.outgoing, self.errors):
            with contextlib.suppress(BrokenPipeError):
                stream.close()


class Relay:
    """Passes bytes between the chief's process and one command on another machine.

    Args:
        host: its name, for messages.
        far: the connection to the command.
        ends: the chief's ends of its streams.
        silence: counts how long nothing was heard, as `HeartbeatTimeout` does.
    """

    def __init__(self, host: str, far: Far, ends: Ends, silence: HeartbeatTimeout) -> None:
        self._host, self._far, self._ends = host, far, ends
        self._sending = threading.Lock()
        self._ended = threading.Event()
        self._problem: str | None = None
        self._receiving = True
        self._silence = silence

    def run(self) -> None:
        """Returns when either side has ended or the connection is lost; the coordinator has been told then."""
        errors = threading.Thread(target=self._pass_errors, name="autodist-relayed-errors", daemon=True)
        errors.start()
        for name, work in {"input": self._pass_input, "output": self._pass_output, "beat": self._beat}.items():
            threading.Thread(target=work, name=f"autodist-relayed-{name}", daemon=True).start()
        while not self._ended.wait(self._silence.look_interval):
            if not self._receiving:
                self._silence.heard()
            if self._silence.is_too_long():
                self._end(
                    f"nothing was heard from {self._host} for {self._silence.limit:g} s; see whether the machine is "
                    "up, and the network to it; where that pauses for longer, raise `silence_timeout`"
                )
        errors.join(1)
        if self._problem is not None:
            self._ends.tell(b"\n" + encode(Lost(self._problem, is_away=True)))
        else:
            self._far.close()  # other commands on the connection go on; where the link is cut, this might block
        self._ends.close()

    def _end(self, problem: str | None) -> None:
        if not self._ended.is_set():
            self._problem = problem
            self._ended.set()

    def _pass_input(self) -> None:
        with self._ends.incoming as lines:
            for line in lines:
                self._send(line)
            self._end(None)

    def _beat(self) -> None:
        while not self._ended.wait(beat_interval(self._silence.limit)):
            self._send(encode(Heartbeat()))

    def _send(self, line: bytes) -> None:
        """Whole lines, since two threads send. Blocks when the link is cut and its buffers are full."""
        try:
            with self._sending:
                self._far.send(line)
        except OSError:
            return  # the channel has ended, which the reading side sees too

    def _pass_output(self) -> None:
        try:
            while received := self._far.receive():
                # A chief that does not take the output (its terminal may be halted) is no silence of the agent.
                self._receiving = False
                _write(self._ends.outgoing, received)
                self._silence.heard()
                self._receiving = True
        except OSError as error:
            self._end(f"passing on what {self._host} sent failed: {error}")
        self._end(self._far.why_ended())

    def _pass_errors(self) -> None:
        while received := self._far.receive_errors():
            _write(self._ends.errors, received)


def _write(target: BinaryIO, content: bytes) -> None:
    target.write(content)
    target.flush()
