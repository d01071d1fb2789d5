"""Transports: start commands on a worker's machine, locally or over SSH."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import IO, Any

from autodist.cluster.protocol import encode
from autodist.cluster.ssh_settings import SSHOrder, SSHSettings
from autodist.cluster.start import noted_start
from autodist.cluster.stream_relay import RelayOrder
from autodist.resources import Node, ResourceSpec


class Channel:
    """The standard streams and the process of a running command.

    Args:
        process: local process of the command, or the relay of all commands on another machine. It has its own session,
            so that Ctrl-C in the chief's terminal does not reach it.
        stdin: bytes to the command.
        stdout: bytes from the command.
        stderr: bytes from the command.
        sends_heartbeats: True if the command runs on another machine, from which an agent sends heartbeats.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        stdin: IO[bytes],
        stdout: IO[bytes],
        stderr: IO[bytes],
        sends_heartbeats: bool = False,
    ) -> None:
        self._process, self.sends_heartbeats = process, sends_heartbeats
        self.stdin, self.stdout, self.stderr = stdin, stdout, stderr
        _open_channels.add(self)

    def wait(self, timeout: float | None = None) -> int | None:
        """Returns the exit status of the process; None if it still runs after `timeout` seconds."""
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def close(self) -> None:
        """Kills the process if it still runs; the agent on the worker's machine then ends, and with it the script."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        with contextlib.suppress(BrokenPipeError):
            self.stdin.close()
        _open_channels.discard(self)


def _leave_to_parent() -> None:
    """Closes the channels in a process forked from this one, whose copies would keep agents alive after the chief."""
    for channel in _open_channels:
        for stream in (channel.stdin, channel.stdout, channel.stderr):
            os.close(stream.fileno())
    _open_channels.clear()
    _opening.release()


_open_channels: set[Channel] = set()
_opening = threading.Lock()
"""Held while channels are opened in another thread: the script must not fork before `_open_channels` has them."""
os.register_at_fork(before=_opening.acquire, after_in_parent=_opening.release, after_in_child=_leave_to_parent)


def _start(
    module: str, *arguments: str, environment: Mapping[str, str] | None, **streams: Any
) -> subprocess.Popen[bytes]:
    """Starts a module on this machine; see `open_channels`.

    Uses a shell, since debuggers attach to a command that starts Python. Runs in the script's initial directory, to
    which PYTHONPATH may be relative.
    """
    directory = noted_start().directory
    return subprocess.Popen(
        ["/bin/sh", "-c", 'exec "$0" "$@"', sys.executable, "-P", "-m", module, *arguments],
        cwd=directory if directory and os.path.isdir(directory) else None,
        start_new_session=True,
        env=environment,
        **streams,
    )


def open_channels(
    spec: ResourceSpec,
    node: Node,
    count: int,
    module: str,
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    retry_limit: float | None = None,
) -> tuple[Channel, ...]:
    """Starts `python -P -m module arguments` on a node, `count` times: locally, or over one connection by SSH.

    -P keeps modules in the user's directory from shadowing Python's. Over SSH, `--silence SECONDS` follows the
    arguments. If a command fails to start, its channel ends, with a `Lost` message if the reason is known.

    Args:
        spec: the machines.
        node: one of them.
        count: number of commands.
        module: the module.
        arguments: its arguments.
        environment: environment variables of processes on this machine; None for those of this process.
        retry_limit: seconds during which a machine that does not answer is retried; None for the spec's value.
    """
    settings = ssh_settings(spec, node, retry_limit)
    if settings is None:
        return tuple(open_local(module, *arguments, environment=environment) for _ in range(count))
    command = (module, *arguments, "--silence", str(spec.silence_timeout))
    order = SSHOrder(settings, command, spec.silence_timeout, spec.reach_timeout)
    return start_relay("ssh", order, count, environment)[1]


def open_local(module: str, *arguments: str, environment: Mapping[str, str] | None = None) -> Channel:
    """Starts a command on this machine, with this process's interpreter; see `open_channels`."""
    pipe = subprocess.PIPE
    with _opening:
        process = _start(module, *arguments, environment=environment, stdin=pipe, stdout=pipe, stderr=pipe)
        assert process.stdin and process.stdout and process.stderr, "all are pipes"
        return Channel(process, process.stdin, process.stdout, process.stderr)


def start_relay(
    kind: str,
    order: RelayOrder,
    count: int,
    environment: Mapping[str, str] | None = None,
    stdout: int = subprocess.DEVNULL,
) -> tuple[subprocess.Popen[bytes], tuple[Channel, ...]]:
    """Starts a relay process; returns the process, and a channel to each command.

    Args:
        kind: "ssh", "forwards" or "rendezvous"; see `relay`.
        order: its order; this function sets `channels`.
        count: number of commands.
        environment: environment variables of the relay; None for those of this process.
        stdout: its standard output.
    """
    with _opening:
        pipes = [tuple(os.pipe() for _ in ("stdin", "stdout", "stderr")) for _ in range(count)]
        theirs = tuple((stdin[0], stdout[1], stderr[1]) for stdin, stdout, stderr in pipes)
        process = _start(
            "autodist.cluster.relay",
            kind,
            environment=environment,
            stdin=subprocess.PIPE,
            stdout=stdout,
            stderr=theirs[0][2],  # for the relay's own errors
            pass_fds=[descriptor for three in theirs for descriptor in three],
        )
        for descriptor in (descriptor for three in theirs for descriptor in three):
            os.close(descriptor)
        # Sent by standard input: other users of this machine can see arguments, and the order may contain secrets.
        assert process.stdin, "stdin is a pipe"
        with contextlib.suppress(BrokenPipeError), process.stdin:  # readers of the channels detect that it has ended
            process.stdin.write(encode(replace(order, channels=theirs)))
        return process, tuple(
            Channel(process, os.fdopen(stdin[1], "wb"), os.fdopen(stdout[0], "rb"), os.fdopen(stderr[0], "rb"), True)
            for stdin, stdout, stderr in pipes
        )


def ssh_settings(spec: ResourceSpec, node: Node, retry_limit: float | None = None) -> SSHSettings | None:
    """Returns the SSH settings of a node, with `retry_limit` as in `open_channels`; None if SSH is not used."""
    group = spec.ssh_group(node)
    if group is None:
        return None
    # A node may be the jump host of another node.
    reached = {other.address: spec.ssh[other.ssh_config] for other in spec.nodes if other.ssh_config}
    others = (SSHSettings.from_group(address, other, spec.connect_timeout) for address, other in reached.items())
    retry_limit = spec.connect_timeout if retry_limit is None else retry_limit
    settings = SSHSettings.from_group(
        node.address, group, spec.connect_timeout, retry_limit, spec.transport or "paramiko"
    )
    return settings.through(others)
