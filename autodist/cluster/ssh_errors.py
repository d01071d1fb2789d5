"""What went wrong on the way to a machine, for every exception of SSH and sockets: host, plain cause, mend."""

from __future__ import annotations

import errno
import socket
from dataclasses import dataclass

import paramiko
from paramiko.ssh_exception import NoValidConnectionsError


@dataclass(frozen=True)
class Endpoint:
    """Where a connection goes, after `~/.ssh/config` has been read.

    Attributes:
        name: of the host as the YAML or the configuration gives it.
        host: name or address that is connected to.
        port: of the SSH server.
        username: to log in as.
        known_hosts: the file whose host keys count.
    """

    name: str
    host: str
    port: int
    username: str
    known_hosts: str

    @property
    def key_name(self) -> str:
        """How known_hosts files spell this server."""
        return self.host if self.port == 22 else f"[{self.host}]:{self.port}"

    @property
    def ssh_command(self) -> str:
        """What a user can try in a terminal."""
        port = "" if self.port == 22 else f"-p {self.port} "
        return f"ssh {port}{self.username}@{self.host}"

    def __str__(self) -> str:
        where = f"{self.host} port {self.port}"
        return where if self.name == self.host else f"{self.name} ({where})"


class UnknownHostKeyError(paramiko.SSHException):
    """The server's key is not in the known_hosts file.

    Args:
        key: what the server showed.
    """

    def __init__(self, key: paramiko.PKey) -> None:
        self.key = key
        super().__init__(f"unknown host key {key.get_name()} {key.fingerprint}")


def explain(error: Exception, endpoint: Endpoint) -> str:
    """The words for an exception that came up while connecting to `endpoint`."""
    match error:
        case UnknownHostKeyError():
            return _unknown_key(error.key, endpoint)
        case paramiko.BadHostKeyException():
            return _changed_key(error, endpoint)
        case paramiko.PasswordRequiredException():
            return (
                f"{endpoint}: the private key is locked by a passphrase. Unlock it in an agent: `ssh-add <key file>`."
            )
        case paramiko.AuthenticationException():
            return _refused_login(endpoint)
        case paramiko.ProxyCommandFailure():
            return (
                f"{endpoint}: the ProxyCommand {error.command!r} failed: {error.error}. Try `{endpoint.ssh_command}`."
            )
        case paramiko.ChannelException():
            return f"{endpoint}: the jump host could not connect to it ({error.text}). Try `{endpoint.ssh_command}`."
        case paramiko.SSHException():
            return f"{endpoint}: no SSH session came about: {error}. Is the port that of an SSH server?"
        case NoValidConnectionsError():
            return explain(next(iter(error.errors.values())), endpoint)
        case EOFError():
            return f"{endpoint}: it closed the connection at once. Try `{endpoint.ssh_command}`."
        case OSError():
            return _unreachable(error, endpoint)
    return f"{endpoint}: {type(error).__name__}: {error}"


def _unknown_key(key: paramiko.PKey, endpoint: Endpoint) -> str:
    port = "" if endpoint.port == 22 else f"-p {endpoint.port} "
    return (
        f"{endpoint}: its host key is not known ({key.get_name()} {key.fingerprint}). If this is the right one, run "
        f"`ssh-keyscan {port}{endpoint.host} >> {endpoint.known_hosts}`."
    )


def _changed_key(error: paramiko.BadHostKeyException, endpoint: Endpoint) -> str:
    return (
        f"{endpoint}: its host key has changed ({error.key.get_name()} {error.key.fingerprint}): it was set up anew, "
        "or somebody else answers in its place. If you know why, run "
        f"`ssh-keygen -R '{endpoint.key_name}' -f {endpoint.known_hosts}` and then "
        f"`ssh-keyscan -p {endpoint.port} {endpoint.host} >> {endpoint.known_hosts}`."
    )


def _refused_login(endpoint: Endpoint) -> str:
    port = "" if endpoint.port == 22 else f"-p {endpoint.port} "
    return (
        f"{endpoint}: it accepts none of the keys offered for user {endpoint.username}. Give the right `username` and "
        f"`key_file`, or run `ssh-copy-id {port}{endpoint.username}@{endpoint.host}`."
    )


def _unreachable(error: OSError, endpoint: Endpoint) -> str:
    if isinstance(error, socket.gaierror):
        return f"{endpoint}: the name cannot be resolved ({error.strerror}). Correct the address, or add it to the DNS."
    if isinstance(error, TimeoutError):
        return f"{endpoint}: no answer in time. Is the machine up, and does no firewall drop the connection?"
    if error.errno == errno.ECONNREFUSED:
        return f"{endpoint}: connection refused. Start an SSH server there, or give its SSH group the right `port`."
    if error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH):
        return f"{endpoint}: there is no route to it. Is the machine up and on the network?"
    return f"{endpoint}: {error.strerror or error}. Try `{endpoint.ssh_command}`."
