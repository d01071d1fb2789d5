"""The relay: a small process beside the chief's that holds the SSH connection to one agent.

`python -m autodist.cluster.relay` reads where to connect and what to start from the first line of its standard input,
and then passes bytes on: its standard input to the command, the command's outputs to its own. It ends when either side
does. Both ends of the connection send heartbeats, since a link that is cut ends nothing by itself: after
`SILENCE_LIMIT` seconds of silence it counts as lost, and the coordinator is told so.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import BinaryIO

import paramiko

from autodist.cluster.protocol import HEARTBEAT_INTERVAL, SILENCE_LIMIT, Heartbeat, Lost, encode
from autodist.cluster.silence import LOOK_INTERVAL, Silence
from autodist.cluster.ssh_connection import CONNECT_LIMIT, connect, quote
from autodist.cluster.ssh_settings import SSHSettings
from autodist.errors import ClusterError

# Before the agent's first word, Python has to be loaded there, maybe from a network drive.
_START_LIMIT = 30.0
_CHUNK = 1 << 16


class Relay:
    """Passes bytes between standard streams and one command on another machine.

    Args:
        host: its name, for messages.
        channel: of the started command.
        incoming: lines for the command.
        outgoing: where its output goes.
    """

    def __init__(self, host: str, channel: paramiko.Channel, incoming: BinaryIO, outgoing: BinaryIO) -> None:
        self._host, self._channel, self._incoming, self._outgoing = host, channel, incoming, outgoing
        self._sending = threading.Lock()
        self._ended = threading.Event()
        self._problem: str | None = None
        self._receiving = True
        self._silence = Silence(patience=_START_LIMIT - SILENCE_LIMIT)

    def run(self) -> None:
        """Returns when either side has ended or the connection is lost; the coordinator has been told then."""
        errors = threading.Thread(target=self._pass_errors, daemon=True)
        errors.start()
        for work in (self._pass_input, self._pass_output, self._beat):
            threading.Thread(target=work, daemon=True).start()
        while not self._ended.wait(LOOK_INTERVAL):
            if not self._receiving:
                self._silence.heard()
            if self._silence.is_too_long():
                self._end(
                    f"nothing was heard from {self._host} for {SILENCE_LIMIT:.0f} s; "
                    "see whether the machine is up, and the network to it"
                )
        errors.join(1)
        if self._problem is not None:
            _write(self._outgoing, b"\n" + encode(Lost(self._problem)))

    def _end(self, problem: str | None) -> None:
        if not self._ended.is_set():
            self._problem = problem
            self._ended.set()

    def _pass_input(self) -> None:
        for line in self._incoming:
            self._send(line)
        self._end(None)

    def _beat(self) -> None:
        while not self._ended.wait(HEARTBEAT_INTERVAL):
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
                _write(self._outgoing, received)
                self._silence.heard()
                self._receiving = True
        except OSError as error:
            self._end(f"passing on what {self._host} sent failed: {error}")
        transport = self._channel.get_transport()
        self._end(None if transport.is_active() else f"the SSH connection to {self._host} broke")

    def _pass_errors(self) -> None:
        while received := self._channel.recv_stderr(_CHUNK):
            _write(sys.stderr.buffer, received)


def _write(target: BinaryIO, content: bytes) -> None:
    target.write(content)
    target.flush()


def _start(client: paramiko.SSHClient, command: list[str]) -> paramiko.Channel:
    transport = client.get_transport()
    assert transport is not None, "the client is connected"
    channel = transport.open_session(timeout=CONNECT_LIMIT)
    channel.exec_command(quote(command))
    return channel


def main() -> int:
    # Descriptors of its own, so that Python does not wait at its end for the thread that reads.
    incoming, outgoing = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    order = json.loads(incoming.readline() or "null")
    if order is None:
        return 0  # the chief has gone already
    settings = SSHSettings(**order["settings"])
    try:
        client = connect(settings)
        channel = _start(client, order["command"])
    except ClusterError as error:
        _write(outgoing, encode(Lost(str(error))))
        return 1
    except (paramiko.SSHException, OSError) as error:
        _write(outgoing, encode(Lost(f"{settings.host}: the SSH server starts no command: {error}")))
        return 1
    Relay(settings.host, channel, incoming, outgoing).run()
    client.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
