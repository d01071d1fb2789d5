"""SSH by paramiko: connections with the settings of the `ssh` command."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Sequence
from threading import Event  # noqa: TID251 - type of a parameter of paramiko's
from typing import Any

import paramiko

from autodist.cluster.known_hosts import KnownKeys, find_known_keys
from autodist.cluster.ssh_errors import (
    ChangedHostKeyError,
    Endpoint,
    RevokedHostKeyError,
    UnknownHostKeyError,
    why_no_connection,
)
from autodist.cluster.ssh_keys import KeyLogin, load_key
from autodist.cluster.ssh_machine import ONE_TRY, SessionRefusedError, SSHCommand, SSHMachine
from autodist.cluster.ssh_route import Hop, find_route
from autodist.cluster.ssh_settings import SSHSettings
from autodist.waits import start_thread

_CHUNK = 1 << 16


class ParamikoMachine(SSHMachine[paramiko.SSHClient]):
    """A machine reached by paramiko."""

    def __exit__(self, *about: object) -> None:
        for client in self._logins:
            client.close()

    def _log_in(self) -> paramiko.SSHClient:
        return connect(self._settings)

    def _start_on(self, login: paramiko.SSHClient, command: str, is_subsystem: bool) -> SSHCommand:
        try:
            channel = _transport_of(login).open_session(timeout=self._settings.connect_timeout)
        except paramiko.ChannelException as error:
            raise SessionRefusedError(str(error)) from error
        (channel.invoke_subsystem if is_subsystem else channel.exec_command)(command)
        return ParamikoCommand(self._settings.host, channel)


class ParamikoCommand(SSHCommand):
    """A command on a connection of paramiko."""

    def __init__(self, host: str, channel: paramiko.Channel) -> None:
        super().__init__(host, channel)
        self._channel = channel

    def receive_errors(self) -> bytes:
        return self._channel.recv_stderr(_CHUNK)

    def close(self) -> None:
        self._channel.close()

    def _is_broken(self) -> bool:
        return not self._channel.get_transport().is_active()


def connect(settings: SSHSettings) -> paramiko.SSHClient:
    """Connects and logs in; the user's SSH configuration supplies missing settings and jump hosts.

    Raises:
        UnreachableError: the machine, or a jump host, does not answer.
        ClusterError: names the host, the cause and the fix.
    """
    target, *jumps = find_route(settings, load_key)
    jump_client = None
    for jump in reversed(jumps):
        jump_client = _connect(jump, jump_client)
    return _connect(target, jump_client)


class _Client(paramiko.SSHClient):
    """A client that also holds the connection to its jump host, if it has one, and closes both.

    Args:
        jump: client of the jump host. paramiko closes a connection when its client is collected.
    """

    def __init__(self, jump: paramiko.SSHClient | None) -> None:
        super().__init__()
        self._jump = jump

    def close(self) -> None:
        super().close()
        if self._jump is not None:
            self._jump.close()


def _connect(hop: Hop, jump: paramiko.SSHClient | None) -> paramiko.SSHClient:
    """Connects to a machine, through the client of its jump host if it has one."""
    endpoint, options, timeout = hop.endpoint, hop.options, hop.settings.connect_timeout
    client, checks = _Client(jump), HostKeys(endpoint, hop.known_hosts, hop.settings.host_key_checking)
    client.set_missing_host_key_policy(checks)
    login = KeyLogin(endpoint.username, hop.key_files, options.uses_agent, options.identities_only)
    command = ProxyCommand(options.proxy_command) if options.proxy_command and jump is None else None
    try:
        client.connect(
            endpoint.host,
            endpoint.port,
            endpoint.username,
            auth_strategy=login,  # type: ignore[arg-type]  # only `authenticate` is called
            transport_factory=checks.transport,
            sock=command.socket if command else _channel_through(jump, endpoint, timeout),
            timeout=min(timeout, ONE_TRY),
            banner_timeout=timeout,
            auth_timeout=timeout,
        )
    except (paramiko.SSHException, OSError, EOFError, UnicodeError) as error:  # UnicodeError: the name is too long
        client.close()
        failure = command.failure() if command else None
        cause = paramiko.ProxyCommandFailure(command.command, failure) if command and failure else error
        raise why_no_connection(cause, endpoint) from cause
    except BaseException:
        client.close()
        raise
    return client


def _channel_through(jump: paramiko.SSHClient | None, endpoint: Endpoint, timeout: float) -> paramiko.Channel | None:
    """Opens a channel from a jump host to a machine; None if there is no jump host."""
    if jump is None:
        return None
    place = (endpoint.host, endpoint.port)
    return _transport_of(jump).open_channel("direct-tcpip", place, ("", 0), timeout=timeout)


def _transport_of(client: paramiko.SSHClient) -> paramiko.Transport:
    transport = client.get_transport()
    assert transport is not None, "the client is connected"
    return transport


class HostKeys(paramiko.MissingHostKeyPolicy):
    """Checks a server's host key, in place of paramiko's own reader of known_hosts files.

    Args:
        endpoint: the server.
        files: known_hosts files.
        checks: True if a host with an unknown key is refused.
    """

    def __init__(self, endpoint: Endpoint, files: Sequence[str], checks: bool) -> None:
        # As in OpenSSH, a key known without a port counts for any port if no key is known for the port.
        names = [endpoint.key_name] if endpoint.alias else [endpoint.key_name, endpoint.host]
        self._known = find_known_keys(files, names) if checks else KnownKeys({})
        self._checks = checks

    def transport(self, sock: Any, **options: Any) -> paramiko.Transport:
        """Creates the transport of the connection; it prefers the types of host keys that are known."""
        transport = _Transport(sock, **options)
        security, kinds = transport.get_security_options(), set(self._known.kinds.values())
        security.key_types = sorted(security.key_types, key=lambda name: _kind_of(name) not in kinds)
        return transport

    def missing_host_key(self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> None:
        content = key.asbytes()
        if not self._checks or (content in self._known.kinds and content not in self._known.revoked):
            return
        if content in self._known.revoked:
            raise RevokedHostKeyError(key)
        if self._known.kinds:
            raise ChangedHostKeyError(key)
        raise UnknownHostKeyError(key, self._known.bad_lines)


class _Transport(paramiko.Transport):
    """Waits for the server's banner, and then for its key, for up to `banner_timeout` each.

    paramiko's client would limit both by the timeout of the port, on a clock that may be adjusted.
    """

    def start_client(self, event: Event | None = None, timeout: float | None = None) -> None:
        self.handshake_timeout = self.banner_timeout
        super().start_client(event)


def _kind_of(algorithm: str) -> str:
    """Returns the key type of a signature algorithm."""
    return "ssh-rsa" if algorithm.startswith("rsa-sha2-") else algorithm


# Seconds for the exit status of a ProxyCommand, to show that it caused the end of the connection.
_STATUS_LIMIT = 1.0


class ProxyCommand:
    """A running ProxyCommand; it ends when `socket` is closed.

    Args:
        command: shell command with its tokens expanded.

    Attributes:
        command: the shell command.
        socket: connected to the standard streams of the command.
    """

    def __init__(self, command: str) -> None:
        self.command = command
        self.socket, theirs = socket.socketpair()
        with theirs:
            # Run by a shell, as in OpenSSH: the command may contain variables, quotes and pipes.
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", f"exec {command}"], stdin=theirs.fileno(), stdout=theirs.fileno()
            )
        start_thread("proxy-command", self._process.wait)

    def failure(self) -> str | None:
        """Returns the exit status as text if the command failed, after its connection broke; else None."""
        try:
            status = self._process.wait(_STATUS_LIMIT)
        except subprocess.TimeoutExpired:
            return None
        return f"exit status {status}" if status else None
