"""Converts exceptions of SSH and sockets into errors that name the host, the cause and the fix."""

from __future__ import annotations

import errno
import socket
from dataclasses import dataclass
from typing import Protocol

import paramiko
from paramiko.ssh_exception import NoValidConnectionsError

from autodist.cluster.ssh_keys import LoginRefusedError, MoreThanKeyError
from autodist.errors import ClusterError

# Error numbers of a machine that is not on the network, or whose SSH server does not listen.
_NOBODY_LISTENS = {errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ETIMEDOUT}

# The reason code of a jump host that could not connect to a machine (RFC 4254).
_CONNECT_FAILED = 2


@dataclass(frozen=True)
class Endpoint:
    """The destination of a connection, after `~/.ssh/config` has been applied.

    Attributes:
        name: name of the host in the YAML or the configuration.
        host: name or address to connect to.
        port: port of the SSH server.
        username: user name for the login.
        known_hosts: the first known_hosts file.
        alias: name under which its host key is looked up, if not its own.
    """

    name: str
    host: str
    port: int
    username: str
    known_hosts: str
    alias: str | None = None

    @property
    def key_name(self) -> str:
        """The name of this server in known_hosts files."""
        if self.alias is not None:
            return self.alias
        return self.host if self.port == 22 else f"[{self.host}]:{self.port}"

    @property
    def port_option(self) -> str:
        """The option for the port of `ssh` and its tools; empty for the usual port."""
        return "" if self.port == 22 else f"-p {self.port} "

    @property
    def ssh_command(self) -> str:
        """The equivalent command for a terminal."""
        return f"ssh {self.port_option}{self.username}@{self.host}"

    def __str__(self) -> str:
        where = f"{self.host} port {self.port}"
        return where if self.name == self.host else f"{self.name} ({where})"


class HostKey(Protocol):
    """The properties of a server's key that messages contain."""

    @property
    def fingerprint(self) -> str:
        """The fingerprint, such as "SHA256:…"."""
        ...

    def get_name(self) -> str:
        """Returns the type, as in known_hosts files."""
        ...


class UnreachableError(ClusterError):
    """Raised when a machine, or a jump host, does not answer. A refused login or a closed connection is an answer."""


class HostKeyError(paramiko.SSHException):
    """Raised when the server's key must not be trusted.

    Args:
        key: the server's key.
        bad_lines: lines of known_hosts files that cannot be parsed.
    """

    def __init__(self, key: HostKey, bad_lines: tuple[str, ...] = ()) -> None:
        self.key, self.bad_lines = key, bad_lines
        super().__init__(f"host key {key.get_name()} {key.fingerprint}")


class UnknownHostKeyError(HostKeyError):
    """Raised when the known_hosts files have no key of the server."""


class ChangedHostKeyError(HostKeyError):
    """Raised when the known_hosts files have other keys of the server."""


class RevokedHostKeyError(HostKeyError):
    """Raised when the known_hosts files mark the key as revoked."""


class ProgramError(Exception):
    """Raised when the `ssh` program ended with an unknown message.

    Args:
        status: its exit status, if it has ended.
        output: its output.
    """

    def __init__(self, status: int | None, output: str) -> None:
        self.status, self.output = status, output
        super().__init__(output)


def why_no_connection(error: Exception, endpoint: Endpoint) -> ClusterError:
    """Returns the error to raise for an exception that occurred while connecting to `endpoint`."""
    kind = UnreachableError if is_silent(error) else ClusterError
    return kind(explain(error, endpoint))


def is_silent(error: BaseException | None) -> bool:
    """Returns True if an exception of a connection means that nothing answers, or that there is no route."""
    match error:
        case NoValidConnectionsError():
            return is_silent(next(iter(error.errors.values())))
        case paramiko.ChannelException():
            return error.code == _CONNECT_FAILED
        case paramiko.AuthenticationException():
            return _takes_too_long(error)
        case paramiko.SSHException():
            return isinstance(_banner_error(error), TimeoutError)
        case TimeoutError() | socket.gaierror():
            return True
        case OSError():
            return error.errno in _NOBODY_LISTENS
    return False


def has_hung_up(error: BaseException | None) -> bool:
    """Returns True if the server closed the connection before its banner, as one does that admits no more logins."""
    ended = _banner_error(error) or error
    return isinstance(ended, EOFError | ConnectionResetError | BrokenPipeError)


def _banner_error(error: BaseException | None) -> BaseException | None:
    """Returns the exception that paramiko caught while it read the server's banner, if there is one."""
    is_of_banner = isinstance(error, paramiko.SSHException) and "protocol banner" in str(error)
    return error.__context__ if error is not None and is_of_banner else None


def _takes_too_long(error: paramiko.AuthenticationException) -> bool:
    return "timeout" in str(error).lower()


def explain(error: Exception, endpoint: Endpoint) -> str:
    """Returns the message for an exception that occurred while connecting to `endpoint`."""
    match error:
        case UnknownHostKeyError():
            return _unknown_key(error, endpoint)
        case ChangedHostKeyError():
            return _changed_key(error.key, endpoint)
        case RevokedHostKeyError():
            return (
                f"{endpoint}: its host key is marked as revoked ({error.key.get_name()} {error.key.fingerprint}), so "
                "that another machine may answer in its place. Generate a new host key for the server."
            )
        case LoginRefusedError():
            return _keys_refused(error, endpoint)
        case MoreThanKeyError():
            return (
                f"{endpoint}: it requires {', '.join(error.wants)} in addition to a key of user {endpoint.username}, "
                "and AutoDist logs in with a key only. Let the server accept that (`AuthenticationMethods publickey`)."
            )
        case paramiko.AuthenticationException():
            return _refused_login(error, endpoint)
        case paramiko.ProxyCommandFailure() | ProgramError():
            return _failed_program(error, endpoint)
        case paramiko.ChannelException():
            return f"{endpoint}: the jump host could not connect to it ({error.text}). Try `{endpoint.ssh_command}`."
        case paramiko.SSHException():
            return (
                f"{endpoint}: no SSH session was established: {error}. Is the port that of an SSH server? If the "
                "machine is only slow, raise `connect_timeout`."
            )
        case NoValidConnectionsError():
            return explain(next(iter(error.errors.values())), endpoint)
        case EOFError():
            return f"{endpoint}: it closed the connection at once. Try `{endpoint.ssh_command}`."
        case OSError():
            return _unreachable(error, endpoint)
    return f"{endpoint}: {type(error).__name__}: {error}"


def _unknown_key(error: HostKeyError, endpoint: Endpoint) -> str:
    bad = f" Lines that cannot be read: {', '.join(error.bad_lines[:3])}." if error.bad_lines else ""
    return (
        f"{endpoint}: its host key is not known ({error.key.get_name()} {error.key.fingerprint}). If this is the right "
        f"one, run `{_scan(endpoint)}`.{bad}"
    )


def _changed_key(key: HostKey, endpoint: Endpoint) -> str:
    return (
        f"{endpoint}: its host key has changed ({key.get_name()} {key.fingerprint}): it was reinstalled, "
        "or another machine answers in its place. If you know why, run "
        f"`ssh-keygen -R '{endpoint.key_name}' -f {endpoint.known_hosts}` and then `{_scan(endpoint)}`."
    )


def _scan(endpoint: Endpoint) -> str:
    """Returns the command that adds the server's keys under the name by which they are looked up."""
    alias = "" if endpoint.alias is None else f" | sed 's/^[^ ]*/{endpoint.alias}/'"
    return f"ssh-keyscan {endpoint.port_option}{endpoint.host}{alias} >> {endpoint.known_hosts}"


def _no_key(error: LoginRefusedError, endpoint: Endpoint) -> str:
    locked = next((key for key in error.unusable if key.is_locked), None)
    if locked is not None:
        return f"{endpoint}: the private key {locked.file} {locked.reason}."
    detail = "; ".join(map(str, error.unusable)) or "set `key_file`, or add a key to an agent by `ssh-add`"
    return f"{endpoint}: there is no private key to log in with as user {endpoint.username}: {detail}."


def _failed_program(error: paramiko.ProxyCommandFailure | ProgramError, endpoint: Endpoint) -> str:
    if isinstance(error, ProgramError):
        output = f"with the output: {error.output}" if error.output else "without any output"
        status = "" if error.status is None else f" with exit status {error.status}"
        failed = f"the `ssh` program ended{status} {output}"
    else:
        failed = f"the ProxyCommand {error.command!r} failed: {error.error}"
    return f"{endpoint}: {failed}. Try `{endpoint.ssh_command}`."


def _keys_refused(error: LoginRefusedError, endpoint: Endpoint) -> str:
    if error.takes and "publickey" not in error.takes:
        return _takes_no_key(error, endpoint)
    return _refused_login(error, endpoint) if error.offered else _no_key(error, endpoint)


def _takes_no_key(error: LoginRefusedError, endpoint: Endpoint) -> str:
    return (
        f"{endpoint}: it takes no key of user {endpoint.username}, but {', '.join(error.takes)}, and AutoDist asks for "
        "no password. Let it accept keys (`PubkeyAuthentication yes` in its sshd_config), or log in manually before "
        "the run and share that connection (`ControlMaster` and `ControlPath` in ~/.ssh/config)."
    )


def _refused_login(error: paramiko.AuthenticationException, endpoint: Endpoint) -> str:
    if _takes_too_long(error):
        return f"{endpoint}: logging in takes too long; raise `connect_timeout` if the machine is only slow."
    details = ""
    if isinstance(error, LoginRefusedError):
        details = f" (it takes {', '.join(error.takes)})" if error.takes else ""
        details += "".join(f"; {key}" for key in error.unusable)
    return (
        f"{endpoint}: it accepts none of the keys offered for user {endpoint.username}{details}. Set the "
        "right `username` and `key_file`, or run "
        f"`ssh-copy-id {endpoint.port_option}{endpoint.username}@{endpoint.host}`."
    )


def _unreachable(error: OSError, endpoint: Endpoint) -> str:
    if isinstance(error, socket.gaierror):
        return f"{endpoint}: the name cannot be resolved ({error.strerror}). Correct the address, or add it to the DNS."
    if isinstance(error, TimeoutError):
        return (
            f"{endpoint}: no answer in time. Is the machine up, and does no firewall drop the connection? If it is "
            "only slow, raise `connect_timeout`."
        )
    if error.errno == errno.ECONNREFUSED:
        return f"{endpoint}: connection refused. Start an SSH server there, or set the right `port` of its SSH group."
    if error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH):
        return f"{endpoint}: there is no route to it. Is the machine up and on the network?"
    return f"{endpoint}: {error.strerror or error}. Try `{endpoint.ssh_command}`."
