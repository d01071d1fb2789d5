"""The relay: a small process beside the chief's that holds the SSH connection to the agents of one machine.

`python -m autodist.cluster.relay` reads a line from its standard input: where to connect, what to start there and, for
each time that it is to be started, three descriptors. Then it passes bytes on: from the first of these to the command,
and from the command's outputs to the others. It ends when all commands have, or those who asked for them. Both ends of
the connection send heartbeats, since a link that is cut ends nothing by itself: after so many seconds of silence it
counts as lost, and the coordinator is told so.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import BinaryIO

import paramiko

from autodist.cluster.protocol import Heartbeat, Lost, encode
from autodist.cluster.silence import Silence, beat_interval
from autodist.cluster.ssh_logins import Logins
from autodist.cluster.ssh_settings import SSHSettings
from autodist.errors import ClusterError

_CHUNK = 1 << 16


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
        """Of descriptors."""
        return Ends(os.fdopen(incoming, "rb"), os.fdopen(outgoing, "wb"), os.fdopen(errors, "wb"))

    def tell(self, content: bytes) -> None:
        """Says something to the chief, if it is there."""
        with contextlib.suppress(BrokenPipeError):
            _write(self.outgoing, content)

    def close(self) -> None:
        """Nothing more comes; the lines for the command may still be read by the thread that passes them on."""
        for stream in (self.outgoing, self.errors):
            with contextlib.suppress(BrokenPipeError):
                stream.close()


class Relay:
    """Passes bytes between the chief's process and one command on another machine.

    Args:
        host: its name, for messages.
        channel: of the started command.
        ends: the chief's ends of its streams.
        silence: that is allowed for.
    """

    def __init__(self, host: str, channel: paramiko.Channel, ends: Ends, silence: Silence) -> None:
        self._host, self._channel, self._ends = host, channel, ends
        self._sending = threading.Lock()
        self._ended = threading.Event()
        self._problem: str | None = None
        self._receiving = True
        self._silence = silence

    def run(self) -> None:
        """Returns when either side has ended or the connection is lost; the coordinator has been told then."""
        errors = threading.Thread(target=self._pass_errors, daemon=True)
        errors.start()
        for work in (self._pass_input, self._pass_output, self._beat):
            threading.Thread(target=work, daemon=True).start()
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
            self._ends.tell(b"\n" + encode(Lost(self._problem)))
        else:
            self._channel.close()  # other commands on the connection go on; where the link is cut, this might block
        self._ends.close()

    def _end(self, problem: str | None) -> None:
        if not self._ended.is_set():
            self._problem = problem
            self._ended.set()

    def _pass_input(self) -> None:
        for line in self._ends.incoming:
            self._send(line)
        self._end(None)

    def _beat(self) -> None:
        while not self._ended.wait(beat_interval(self._silence.limit)):
            self._send(encode(Heartbeat()))

    def _send(self, line: bytes) -> None:
        """Whole lines, since two threads send. Blocks when the link is cut and its buffers are full."""
        try:
            with self._sending:
                self._channel.sendall(line)
        except OSError:
            return  # the channel has ended, which the reading side sees too

    def _pass_output(self) -> None:
        try:
            while received := self._channel.recv(_CHUNK):
                # A chief that does not take the output (its terminal may be halted) is no silence of the agent.
                self._receiving = False
                _write(self._ends.outgoing, received)
                self._silence.heard()
                self._receiving = True
        except OSError as error:
            self._end(f"passing on what {self._host} sent failed: {error}")
        transport = self._channel.get_transport()
        self._end(None if transport.is_active() else f"the SSH connection to {self._host} broke")

    def _pass_errors(self) -> None:
        while received := self._channel.recv_stderr(_CHUNK):
            _write(self._ends.errors, received)


def _write(target: BinaryIO, content: bytes) -> None:
    target.write(content)
    target.flush()


def _relay_all(
    settings: SSHSettings, module: Sequence[str], all_ends: Sequence[Ends], make_silence: Callable[[], Silence]
) -> None:
    """Starts a command for each of the chief's ends, one after another, and returns when all have ended."""
    with Logins(settings, lambda seconds: _stays_for(seconds, all_ends)) as logins:
        relays = []
        problem = None
        for ends in all_ends:
            if problem is None:
                try:
                    channel = logins.start(settings.command(*module), settings.preamble)
                except ClusterError as error:
                    problem = str(error)
                else:
                    relays.append(threading.Thread(target=Relay(settings.host, channel, ends, make_silence()).run))
                    relays[-1].start()
                    continue
            ends.tell(encode(Lost(problem)))
            ends.close()
        for relay in relays:
            relay.join()


def _stays_for(seconds: float, all_ends: Sequence[Ends]) -> bool:
    """Waits, and says whether the chief is still there."""
    gone = select.poll()
    for ends in all_ends:
        gone.register(ends.incoming, 0)  # that the other end was closed is told without asking
    return not gone.poll(seconds * 1000)


def main() -> int:
    order = json.loads(sys.stdin.readline() or "null")
    if order is None:
        return 0  # the chief has gone already
    limit, first = order["limits"]["silence_timeout"], order["limits"]["reach_timeout"]
    # Before an agent's first word, Python has to be loaded there, maybe from a network drive.
    make_silence = functools.partial(Silence, limit, patience=max(0.0, first - limit))
    all_ends = [Ends.of(*three) for three in order["channels"]]
    _relay_all(SSHSettings(**order["settings"]), order["module"], all_ends, make_silence)
    return 0


if __name__ == "__main__":
    sys.exit(main())
