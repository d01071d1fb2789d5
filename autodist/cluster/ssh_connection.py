"""An SSH connection to one machine with the settings of the `ssh` command."""

from __future__ import annotations

import shlex
import socket
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import replace
from threading import Event
from typing import Any

import paramiko

from autodist.cluster.known_hosts import KnownKeys, find_known_keys
from autodist.cluster.ssh_config import SSHOptions, read_options
from autodist.cluster.ssh_errors import (
    ChangedHostKeyError,
    Endpoint,
    RevokedHostKeyError,
    UnknownHostKeyError,
    why_no_connection,
)
from autodist.cluster.ssh_hops import endpoint_of, jump_settings, known_hosts_of, require_progress
from autodist.cluster.ssh_keys import KeyLogin, UnusableKeyError, load_key
from autodist.cluster.ssh_settings import SSHSettings
from autodist.errors import ClusterError

# paramiko closes a connection when its client is collected; this list keeps those to jump hosts open.
_jump_clients: list[paramiko.SSHClient] = []

ONE_TRY = 15.0
"""Seconds for reaching a port: the kernel's retries become ever slower, so a new attempt succeeds sooner."""


def connect(settings: SSHSettings, jumps: Sequence[str] = (), behind: Sequence[Endpoint] = ()) -> paramiko.SSHClient:
    """Connects and logs in; the user's SSH configuration supplies missing settings and jump hosts.

    Args:
        settings: SSH settings of the machine.
        jumps: jump hosts, as in ProxyJump, that replace those of the configuration.
        behind: the machines for which this one is a jump host, the nearest first.

    Raises:
        UnreachableError: the machine, or a jump host, does not answer.
        ClusterError: names the host, the cause and the fix.
    """
    options = read_options(settings.host, settings.username, settings.port, jumps)
    files, endpoint = known_hosts_of(settings, options), endpoint_of(settings, options)
    require_progress(endpoint, behind)
    _check_key_file(settings, endpoint)
    client, checks = paramiko.SSHClient(), HostKeys(endpoint, files, settings.host_key_checking)
    client.set_missing_host_key_policy(checks)
    login = KeyLogin(
        endpoint.username,
        [settings.key_file] if settings.key_file else options.identity_files,
        options.uses_agent,
        options.identities_only,
    )
    command = ProxyCommand(options.proxy_command) if options.proxy_command and not options.proxy_jump else None
    try:
        client.connect(
            endpoint.host,
            endpoint.port,
            endpoint.username,
            auth_strategy=login,  # type: ignore[arg-type]  # only `authenticate` is called
            transport_factory=checks.transport,
            sock=command.socket if command else _through_jumps(settings, options, endpoint, behind),
            timeout=min(settings.connect_timeout, ONE_TRY),
            banner_timeout=settings.connect_timeout,
            auth_timeout=settings.connect_timeout,
        )
    except (paramiko.SSHException, OSError, EOFError, UnicodeError) as error:  # UnicodeError: the name is too long
        client.close()
        failure = command.failure() if command else None
        cause = paramiko.ProxyCommandFailure(command.command, failure) if command and failure else error
        raise why_no_connection(cause, endpoint) from cause
    return client


def quote(command: Sequence[str]) -> str:
    """Returns the command line for the other machine's shell: quotes each argument, except a leading `~/`.

    >>> quote(["env", "A=b c", "~/my env/bin/python"])
    "env 'A=b c' ~/'my env/bin/python'"
    """
    return " ".join(_quote_one(argument) for argument in command)


def _quote_one(argument: str) -> str:
    if argument.startswith("~/"):
        return "~/" + shlex.quote(argument[2:])
    return shlex.quote(argument)


def _check_key_file(settings: SSHSettings, endpoint: Endpoint) -> None:
    """Checks that the `key_file` in the YAML is a key; a locked key is allowed, since an agent may hold it."""
    if settings.key_file is None:
        return
    try:
        load_key(settings.key_file)
    except UnusableKeyError as error:
        if not error.is_locked:
            raise ClusterError(f"{endpoint}: the key file {error}. Correct `key_file`.") from error


def _through_jumps(
    settings: SSHSettings, options: SSHOptions, endpoint: Endpoint, behind: Sequence[Endpoint]
) -> paramiko.Channel | None:
    """Opens a channel through the jump hosts; None if there are none."""
    if not options.proxy_jump:
        return None
    *before, last = options.proxy_jump
    jump = replace(jump_settings(last, settings.others), connect_timeout=settings.connect_timeout)
    client = connect(jump, before, (endpoint, *behind))
    transport = client.get_transport()
    assert transport is not None, "the client is connected"
    try:
        channel = transport.open_channel(
            "direct-tcpip", (endpoint.host, endpoint.port), ("", 0), timeout=settings.connect_timeout
        )
    except BaseException:
        client.close()  # the caller may try again
        raise
    _jump_clients.append(client)
    return channel


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
        command: as passed.
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
        threading.Thread(target=self._process.wait, name="autodist-proxy-command", daemon=True).start()

    def failure(self) -> str | None:
        """Returns the exit status as text if the command failed, after its connection broke; else None."""
        try:
            status = self._process.wait(_STATUS_LIMIT)
        except subprocess.TimeoutExpired:
            return None
        return f"exit status {status}" if status else None
