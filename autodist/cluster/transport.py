"""How a command is started on a worker's machine: here, or over SSH."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Protocol

from autodist.cluster.ssh_settings import SSHSettings


class Channel:
    """A started command: its three streams, and its end.

    The process is in a session of its own, so that Ctrl-C in the chief's terminal does not reach it.

    Args:
        command: arguments, the program first.

    Attributes:
        stdin: bytes to the command.
        stdout: bytes from the command.
        stderr: bytes from the command.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        streams = (self._process.stdin, self._process.stdout, self._process.stderr)
        self.stdin, self.stdout, self.stderr = (stream for stream in streams if stream is not None)
        _open_channels.add(self)

    def wait(self, timeout: float | None = None) -> int | None:
        """Exit status of the command; None if it still runs after `timeout` seconds."""
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def close(self) -> None:
        """Ends the command, if it still runs: on a worker's machine the agent ends then, and with it the script."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        with contextlib.suppress(BrokenPipeError):
            self.stdin.close()
        _open_channels.discard(self)


def _leave_to_parent() -> None:
    """In a process forked from this one: without this, its copies would keep agents alive after the chief's death."""
    for channel in _open_channels:
        for stream in (channel.stdin, channel.stdout, channel.stderr):
            os.close(stream.fileno())
    _open_channels.clear()


_open_channels: set[Channel] = set()
os.register_at_fork(after_in_child=_leave_to_parent)


class Transport(Protocol):
    """A way to start Python modules on a machine."""

    def open(self, module: str, *arguments: str) -> Channel:
        """Starts `python -P -m module arguments` there (-P: modules in the user's directory must not shadow Python's).

        The command may turn out not to have started: its channel then ends, with a `Lost` message where the reason is
        known.
        """
        ...


class LocalTransport:
    """Starts commands on this machine, with this process's interpreter and environment."""

    def open(self, module: str, *arguments: str) -> Channel:
        return Channel([sys.executable, "-P", "-m", module, *arguments])


class SSHTransport:
    """Starts commands on another machine, over a connection that a *relay* holds.

    The relay is a small process on this machine. The chief's may keep Python's global lock for longer than
    `SILENCE_LIMIT` (a large `json.load` does); with the connection inside it, the other machine would hear nothing and
    take the chief for lost.

    Args:
        settings: how the machine is reached.
    """

    def __init__(self, settings: SSHSettings) -> None:
        self._settings = settings

    def open(self, module: str, *arguments: str) -> Channel:
        command = self._settings.command(module, *arguments)
        channel = LocalTransport().open("autodist.cluster.relay")
        # By standard input: other users of this machine can see arguments, and the variables may be secret.
        with contextlib.suppress(BrokenPipeError):  # that the relay has ended is seen by whoever reads the channel
            channel.stdin.write(json.dumps({"settings": self._settings.as_json(), "command": command}).encode() + b"\n")
            channel.stdin.flush()
        return channel
