"""A connection to one machine, made as the `ssh` command would make it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace

import paramiko

from autodist.cluster.host_keys import HostKeys
from autodist.cluster.proxy_command import ProxyCommand
from autodist.cluster.ssh_config import SSHOptions, read_options
from autodist.cluster.ssh_errors import Endpoint, why_no_connection
from autodist.cluster.ssh_hops import endpoint_of, jump_settings, known_hosts_of, require_progress
from autodist.cluster.ssh_keys import KeyLogin, UnusableKeyError, load_key
from autodist.cluster.ssh_settings import SSHSettings
from autodist.errors import ClusterError

# paramiko closes a connection when its client is collected; those to jump hosts live as long as this process.
_jump_clients: list[paramiko.SSHClient] = []

ONE_TRY = 15.0
"""Seconds for reaching a port: the kernel asks again after ever longer pauses, and whoever tries anew asks sooner."""


def connect(settings: SSHSettings, jumps: Sequence[str] = (), behind: Sequence[Endpoint] = ()) -> paramiko.SSHClient:
    """Connects and logs in; the user's SSH configuration is read for what the settings leave open, jump hosts included.

    Args:
        settings: of the machine.
        jumps: hosts to go through, as ProxyJump has them, in place of those in the configuration.
        behind: what this machine is gone through for, the last first.

    Raises:
        UnreachableError: the machine, or a jump host, does not answer.
        ClusterError: with the host, the cause and the mend.
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
            auth_strategy=login,  # type: ignore[arg-type]  # nothing but `authenticate` is asked of one
            transport_factory=checks.transport,
            sock=command.socket if command else _through_jumps(settings, options, endpoint, behind),
            timeout=min(settings.connect_timeout, ONE_TRY),
            banner_timeout=settings.connect_timeout,
            auth_timeout=settings.connect_timeout,
        )
    except (paramiko.SSHException, OSError, EOFError, UnicodeError) as error:  # UnicodeError: no name can be so long
        client.close()
        failure = command.failure() if command else None
        cause = paramiko.ProxyCommandFailure(command.command, failure) if command and failure else error
        raise why_no_connection(cause, endpoint) from cause
    return client


def quote(command: Sequence[str]) -> str:
    """The command line for the other machine's shell: each argument quoted by itself, a leading `~/` left to the shell.

    >>> quote(["env", "A=b c", "~/my env/bin/python"])
    "env 'A=b c' ~/'my env/bin/python'"
    """
    return " ".join(_quote_one(argument) for argument in command)


def _quote_one(argument: str) -> str:
    if argument.startswith("~/"):
        return "~/" + shlex.quote(argument[2:])
    return shlex.quote(argument)


def _check_key_file(settings: SSHSettings, endpoint: Endpoint) -> None:
    """Passes unless the YAML names a key that cannot be one; an agent may hold a locked one."""
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
    """What the connection runs through, if not straight: the last of the jump hosts."""
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
        client.close()  # it may be tried again
        raise
    _jump_clients.append(client)
    return channel
