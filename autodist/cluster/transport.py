"""How a command is started on a worker's machine: here, or over SSH."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import IO, Any, Protocol

from autodist.cluster.ssh_settings import SSHSettings
from autodist.cluster.start import noted_start
from autodist.resources import Node, ResourceSpec


class Channel:
    """A started command: its three streams, and its end.

    Args:
        process: that runs the command here, or carries it and others of the same machine. It is in a session of its
            own, so that Ctrl-C in the chief's terminal does not reach it.
        stdin: bytes to the command.
        stdout: bytes from the command.
        stderr: bytes from the command.
        beats: whether the command runs on another machine, and an agent sends heartbeats from there.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        stdin: IO[bytes],
        stdout: IO[bytes],
        stderr: IO[bytes],
        beats: bool = False,
    ) -> None:
        self._process, self.beats = process, beats
        self.stdin, self.stdout, self.stderr = stdin, stdout, stderr
        _open_channels.add(self)

    def wait(self, timeout: float | None = None) -> int | None:
        """Exit status of the process; None if it still runs after `timeout` seconds."""
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def close(self) -> None:
        """Ends the process, if it still runs: on a worker's machine the agent ends then, and with it the script."""
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
    _opening.release()


_open_channels: set[Channel] = set()
_opening = threading.Lock()
"""Held while channels are opened, beside the script: it must not fork between a pipe and its being known here."""
os.register_at_fork(before=_opening.acquire, after_in_parent=_opening.release, after_in_child=_leave_to_parent)


def _start(
    module: str, *arguments: str, environment: Mapping[str, str] | None, **streams: Any
) -> subprocess.Popen[bytes]:
    """Runs a module here, as `Transport.open` says.

    By a shell, since debuggers go after what starts Python; where the script was started, which PYTHONPATH may go by.
    """
    directory = noted_start().directory
    return subprocess.Popen(
        ["/bin/sh", "-c", 'exec "$0" "$@"', sys.executable, "-P", "-m", module, *arguments],
        cwd=directory if directory and os.path.isdir(directory) else None,
        start_new_session=True,
        env=environment,
        **streams,
    )


class Transport(Protocol):
    """A way to start Python modules on a machine."""

    def open(self, count: int, module: str, *arguments: str) -> tuple[Channel, ...]:
        """Starts `python -P -m module arguments` there, `count` times.

        (-P: modules in the user's directory must not shadow Python's.) A command may turn out not to have started: its
        channel then ends, with a `Lost` message where the reason is known.
        """
        ...


class LocalTransport:
    """Starts commands on this machine, with this process's interpreter.

    Args:
        environment: of the commands; None: this process's.
    """

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self._environment = environment

    def open(self, count: int, module: str, *arguments: str) -> tuple[Channel, ...]:
        return tuple(self._open_one(module, *arguments) for _ in range(count))

    def _open_one(self, module: str, *arguments: str) -> Channel:
        pipe = subprocess.PIPE
        with _opening:
            process = _start(module, *arguments, environment=self._environment, stdin=pipe, stdout=pipe, stderr=pipe)
            assert process.stdin and process.stdout and process.stderr, "all are pipes"
            return Channel(process, process.stdin, process.stdout, process.stderr)


class SSHTransport:
    """Starts commands on another machine, over a connection that a *relay* holds, one for all commands.

    The relay is a small process on this machine. The chief's may keep Python's global lock for longer than
    the limit of silence (a large `json.load` does); with the connection inside it, the other machine would hear nothing
    and take the chief for lost.

    Args:
        settings: how the machine is reached.
        silence_timeout: seconds without a word after which it counts as lost.
        reach_timeout: seconds until the first word.
        environment: of the relay, which has the SSH agent's address, say; None: this process's.
    """

    def __init__(
        self,
        settings: SSHSettings,
        silence_timeout: float,
        reach_timeout: float,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._settings, self._environment = settings, environment
        self._limits = {"silence_timeout": silence_timeout, "reach_timeout": reach_timeout}

    def open(self, count: int, module: str, *arguments: str) -> tuple[Channel, ...]:
        order = {"settings": self._settings.as_json(), "module": [module, *arguments], "limits": self._limits}
        return start_between("autodist.cluster.ssh_relay", count, order, self._environment)[1]


def start_between(
    module: str,
    count: int,
    order: Mapping[str, Any],
    environment: Mapping[str, str] | None = None,
    stdout: int = subprocess.DEVNULL,
) -> tuple[subprocess.Popen[bytes], tuple[Channel, ...]]:
    """Starts a process beside this one that passes bytes between it and commands on other machines.

    Args:
        module: that runs there. It reads a line of JSON from its standard input: the order, and as `channels` three
            descriptors for each command.
        count: of commands.
        order: what else it is told.
        environment: of the process; None: this one's.
        stdout: its standard output.
    """
    with _opening:
        ways = [tuple(os.pipe() for _ in ("stdin", "stdout", "stderr")) for _ in range(count)]
        theirs = [(stdin[0], stdout[1], stderr[1]) for stdin, stdout, stderr in ways]
        process = _start(
            module,
            environment=environment,
            stdin=subprocess.PIPE,
            stdout=stdout,
            stderr=theirs[0][2],  # what it has to say itself
            pass_fds=[descriptor for three in theirs for descriptor in three],
        )
        for descriptor in (descriptor for three in theirs for descriptor in three):
            os.close(descriptor)
        # By standard input: other users of this machine can see arguments, and the order may be secret.
        assert process.stdin, "it is a pipe"
        with contextlib.suppress(BrokenPipeError), process.stdin:  # who reads the channels sees that it has ended
            process.stdin.write(json.dumps({**order, "channels": theirs}).encode() + b"\n")
        return process, tuple(
            Channel(process, os.fdopen(stdin[1], "wb"), os.fdopen(stdout[0], "rb"), os.fdopen(stderr[0], "rb"), True)
            for stdin, stdout, stderr in ways
        )


def transport_to(
    spec: ResourceSpec, node: Node, environment: Mapping[str, str] | None = None, patience: float | None = None
) -> Transport:
    """How commands are started on a node: here, or over SSH as its group says.

    Args:
        spec: the machines.
        node: one of them.
        environment: of what runs on this machine; None: this process's.
        patience: seconds for which a machine that does not answer is tried again; None: as the spec says.
    """
    settings = ssh_settings(spec, node, patience)
    if settings is None:
        return LocalTransport(environment)
    return SSHTransport(settings, spec.silence_timeout, spec.reach_timeout, environment)


def ssh_settings(spec: ResourceSpec, node: Node, patience: float | None = None) -> SSHSettings | None:
    """The way in to a node, with the same patience; None where SSH is not used."""
    group = spec.ssh_group(node)
    if group is None:
        return None
    # A node may be the jump host on the way to another.
    reached = {other.address: spec.ssh[other.ssh_config] for other in spec.nodes if other.ssh_config}
    others = (SSHSettings.of_group(address, other, spec.connect_timeout) for address, other in reached.items())
    patience = spec.connect_timeout if patience is None else patience
    own = SSHSettings.of_group(node.address, group, spec.connect_timeout, patience, spec.transport or "paramiko")
    return own.through(others)
