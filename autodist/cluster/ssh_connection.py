"""A connection to one machine, made as the `ssh` command would make it."""

from __future__ import annotations

import getpass
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

import paramiko

from autodist.cluster.ssh_errors import Endpoint, UnknownHostKeyError, explain
from autodist.cluster.ssh_settings import SSHSettings
from autodist.errors import ClusterError

CONNECT_LIMIT = 10.0
"""Seconds for each step of connecting: reaching the port, the server's greeting, logging in."""

_SYSTEM_KNOWN_HOSTS = Path("/etc/ssh/ssh_known_hosts")


# paramiko closes a connection when its client is collected; those to jump hosts live as long as this process.
_jump_clients: list[paramiko.SSHClient] = []


def connect(settings: SSHSettings, jumps: Sequence[str] = ()) -> paramiko.SSHClient:
    """Connects and logs in; `~/.ssh/config` is read for what the settings leave open, jump hosts included.

    Args:
        settings: of the machine.
        jumps: hosts to go through, as ProxyJump has them, in place of those in the configuration.

    Raises:
        ClusterError: with the host, the cause and the mend.
    """
    options = _user_config().lookup(settings.host)
    endpoint = _endpoint(settings, options)
    _check_key_file(settings, endpoint)
    client = _client(settings, endpoint)
    try:
        client.connect(
            endpoint.host,
            endpoint.port,
            endpoint.username,
            key_filename=_key_files(settings, options),  # type: ignore[arg-type]  # the stubs know one file only
            allow_agent=options.get("identitiesonly", "no") != "yes",
            look_for_keys=settings.key_file is None,
            sock=_way(options, endpoint, jumps),
            timeout=CONNECT_LIMIT,
            banner_timeout=CONNECT_LIMIT,
            auth_timeout=CONNECT_LIMIT,
        )
    except (paramiko.SSHException, OSError, EOFError) as error:
        client.close()
        raise ClusterError(explain(error, endpoint)) from error
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


def _user_config() -> paramiko.SSHConfig:
    path = Path.home() / ".ssh" / "config"
    return paramiko.SSHConfig.from_path(str(path)) if path.is_file() else paramiko.SSHConfig()


def _endpoint(settings: SSHSettings, options: paramiko.SSHConfigDict) -> Endpoint:
    return Endpoint(
        name=settings.host,
        host=options.get("hostname", settings.host),
        port=settings.port or int(options.get("port", 22)),
        username=settings.username or options.get("user") or getpass.getuser(),
        known_hosts=settings.known_hosts or str(Path.home() / ".ssh" / "known_hosts"),
    )


def _check_key_file(settings: SSHSettings, endpoint: Endpoint) -> None:
    if settings.key_file is not None and not os.access(settings.key_file, os.R_OK):
        raise ClusterError(f"{endpoint}: the key file {settings.key_file} cannot be read; correct `key_file`.")


def _client(settings: SSHSettings, endpoint: Endpoint) -> paramiko.SSHClient:
    client = paramiko.SSHClient()
    if not settings.host_key_checking:
        client.set_missing_host_key_policy(_Accept())
        return client
    client.set_missing_host_key_policy(_Refuse())
    files = [Path(endpoint.known_hosts)] if settings.known_hosts else [Path(endpoint.known_hosts), _SYSTEM_KNOWN_HOSTS]
    for file in files:
        if file.is_file():
            client.load_system_host_keys(str(file))
    return client


def _key_files(settings: SSHSettings, options: paramiko.SSHConfigDict) -> list[str]:
    return [settings.key_file] if settings.key_file else list(options.get("identityfile", []))


def _way(
    options: paramiko.SSHConfigDict, endpoint: Endpoint, jumps: Sequence[str]
) -> paramiko.Channel | paramiko.ProxyCommand | None:
    """What the connection runs through, if not straight: the last of the jump hosts, or a command."""
    configured = options.get("proxyjump", "none")
    jumps = jumps or (configured.split(",") if configured != "none" else [])
    if jumps:
        return _through_jumps(jumps, endpoint)
    command = options.get("proxycommand", "none")
    return None if command == "none" else paramiko.ProxyCommand(command)


def _through_jumps(jumps: Sequence[str], endpoint: Endpoint) -> paramiko.Channel:
    client = connect(_jump_settings(jumps[-1]), jumps[:-1])
    _jump_clients.append(client)
    transport = client.get_transport()
    assert transport is not None, "the client is connected"
    return transport.open_channel("direct-tcpip", (endpoint.host, endpoint.port), ("", 0), timeout=CONNECT_LIMIT)


def _jump_settings(jump: str) -> SSHSettings:
    """Of `[user@]host[:port]`, as ProxyJump has it."""
    user, _, place = jump.strip().removeprefix("ssh://").rpartition("@")
    host, colon, port = place.rpartition(":")
    return SSHSettings(host=host if colon else place, username=user or None, port=int(port) if colon else None)


class _Refuse(paramiko.MissingHostKeyPolicy):
    """Takes no host whose key is not known."""

    def missing_host_key(self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> None:
        raise UnknownHostKeyError(key)


class _Accept(paramiko.MissingHostKeyPolicy):
    """Takes every host, where the YAML says `host_key_checking: false`."""

    def missing_host_key(self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> None:
        return
