"""What went wrong on the way to a machine, for every exception of SSH and sockets: host, plain cause, mend."""

from __future__ import annotations

import errno
import socket
from dataclasses import dataclass
from typing import Protocol

import paramiko
from paramiko.ssh_exception import NoValidConnectionsError

from autodist.cluster.ssh_keys import LoginRefusedError, MoreThanKeyError
from autodist.errors import ClusterError

# As long as a machine is not on the network, or its SSH server does not listen.
_NOBODY_LISTENS = {errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ETIMEDOUT}

# Why a jump host has not connected to a machine: it could not, as SSH counts reasons (RFC 4254).
_CONNECT_FAILED = 2


@dataclass(frozen=True)
class Endpoint:
    """Where a connection goes, after `~/.ssh/config` has been read.

    Attributes:
        name: of the host as the YAML or the configuration gives it.
        host: name or address that is connected to.
        port: of the SSH server.
        username: to log in as.
        known_hosts: the file whose host keys count, the first of several.
        alias: under which name its host key is looked up, if not its own.
    """

    name: str
    host: str
    port: int
    username: str
    known_hosts: str
    alias: str | None = None

    @property
    def key_name(self) -> str:
        """How known_hosts files spell this server."""
        if self.alias is not None:
            return self.alias
        return self.host if self.port == 22 else f"[{self.host}]:{self.port}"

    @property
    def ssh_command(self) -> str:
        """What a user can try in a terminal."""
        port = "" if self.port == 22 else f"-p {self.port} "
        return f"ssh {port}{self.username}@{self.host}"

    def __str__(self) -> str:
        where = f"{self.host} port {self.port}"
        return where if self.name == self.host else f"{self.name} ({where})"


class HostKey(Protocol):
    """A server's key, as far as it is told of."""

    @property
    def fingerprint(self) -> str:
        """Such as "SHA256:…"."""
        ...

    def get_name(self) -> str:
        """Its kind, as known_hosts files have it."""
        ...


class UnreachableError(ClusterError):
    """A machine, or one on the way to it, does not answer. One that refuses a login, or hangs up, has answered."""


class HostKeyError(paramiko.SSHException):
    """The server's key is not to be trusted.

    Args:
        key: what the server showed.
        bad_lines: of known_hosts files, that cannot be read.
    """

    def __init__(self, key: HostKey, bad_lines: tuple[str, ...] = ()) -> None:
        self.key, self.bad_lines = key, bad_lines
        super().__init__(f"host key {key.get_name()} {key.fingerprint}")


class UnknownHostKeyError(HostKeyError):
    """No key of the server is in the known_hosts files."""


class ChangedHostKeyError(HostKeyError):
    """The known_hosts files have other keys of the server."""


class RevokedHostKeyError(HostKeyError):
    """The known_hosts files say that the key is not to be trusted."""


class ProgramError(Exception):
    """The `ssh` program ended with words that are not known.

    Args:
        status: its exit status, if it has ended.
        said: its words.
    """

    def __init__(self, status: int | None, said: str) -> None:
        self.status, self.said = status, said
        super().__init__(said)


def why_no_connection(error: Exception, endpoint: Endpoint) -> ClusterError:
    """What to raise from an exception that came up while connecting to `endpoint`."""
    kind = UnreachableError if is_silent(error) else ClusterError
    return kind(explain(error, endpoint))


def is_silent(error: BaseException | None) -> bool:
    """Whether an exception of a connection says that nobody answers, or that there is no way to who would."""
    match error:
        case NoValidConnectionsError():
            return is_silent(next(iter(error.errors.values())))
        case paramiko.ChannelException():
            return error.code == _CONNECT_FAILED
        case paramiko.AuthenticationException():
            return _takes_too_long(error)
        case paramiko.SSHException():
            return isinstance(_in_place_of_a_greeting(error), TimeoutError)
        case TimeoutError() | socket.gaierror():
            return True
        case OSError():
            return error.errno in _NOBODY_LISTENS
    return False


def has_hung_up(error: BaseException | None) -> bool:
    """Whether the server ended the connection before it said anything, as one does that admits no more logins."""
    ended = _in_place_of_a_greeting(error) or error
    return isinstance(ended, EOFError | ConnectionResetError | BrokenPipeError)


def _in_place_of_a_greeting(error: BaseException | None) -> BaseException | None:
    """What came where the server should have said who it is."""
    is_that = isinstance(error, paramiko.SSHException) and "protocol banner" in str(error)
    return error.__context__ if error is not None and is_that else None


def _takes_too_long(error: paramiko.AuthenticationException) -> bool:
    return "timeout" in str(error).lower()


def explain(error: Exception, endpoint: Endpoint) -> str:
    """The words for an exception that came up while connecting to `endpoint`."""
    match error:
        case UnknownHostKeyError():
            return _unknown_key(error, endpoint)
        case ChangedHostKeyError():
            return _changed_key(error.key, endpoint)
        case RevokedHostKeyError():
            return (
                f"{endpoint}: its host key is marked as revoked ({error.key.get_name()} {error.key.fingerprint}), so "
                "that somebody else may answer in its place. Give the server a new host key."
            )
        case LoginRefusedError():
            return _keys_refused(error, endpoint)
        case MoreThanKeyError():
            return (
                f"{endpoint}: it wants {', '.join(error.wants)} besides a key of user {endpoint.username}, and "
                "AutoDist logs in by a key alone. Let the server take that (`AuthenticationMethods publickey`)."
            )
        case paramiko.AuthenticationException():
            return _refused_login(error, endpoint)
        case paramiko.ProxyCommandFailure() | ProgramError():
            return _failed_program(error, endpoint)
        case paramiko.ChannelException():
            return f"{endpoint}: the jump host could not connect to it ({error.text}). Try `{endpoint.ssh_command}`."
        case paramiko.SSHException():
            return (
                f"{endpoint}: no SSH session came about: {error}. Is the port that of an SSH server? If the "
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
        f"{endpoint}: its host key has changed ({key.get_name()} {key.fingerprint}): it was set up anew, "
        "or somebody else answers in its place. If you know why, run "
        f"`ssh-keygen -R '{endpoint.key_name}' -f {endpoint.known_hosts}` and then `{_scan(endpoint)}`."
    )


def _scan(endpoint: Endpoint) -> str:
    """The command that adds the server's keys, under the name by which they are looked up."""
    port = "" if endpoint.port == 22 else f"-p {endpoint.port} "
    alias = "" if endpoint.alias is None else f" | sed 's/^[^ ]*/{endpoint.alias}/'"
    return f"ssh-keyscan {port}{endpoint.host}{alias} >> {endpoint.known_hosts}"


def _no_key(error: LoginRefusedError, endpoint: Endpoint) -> str:
    locked = next((key for key in error.unusable if key.is_locked), None)
    if locked is not None:
        return f"{endpoint}: the private key {locked.file} {locked.reason}."
    found = "; ".join(map(str, error.unusable)) or "give a `key_file`, or put one into an agent by `ssh-add`"
    return f"{endpoint}: there is no private key to log in with as user {endpoint.username}: {found}."


def _failed_program(error: paramiko.ProxyCommandFailure | ProgramError, endpoint: Endpoint) -> str:
    if isinstance(error, ProgramError):
        told = f"saying: {error.said}" if error.said else "without a word"
        status = "" if error.status is None else f" with exit status {error.status}"
        failed = f"the `ssh` program ended{status}, {told}"
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
        "no password. Let it take keys (`PubkeyAuthentication yes` in its sshd_config), or log in by hand before the "
        "run and let that connection be used (`ControlMaster` and `ControlPath` in ~/.ssh/config)."
    )


def _refused_login(error: paramiko.AuthenticationException, endpoint: Endpoint) -> str:
    if _takes_too_long(error):
        return f"{endpoint}: logging in takes too long; raise `connect_timeout` if the machine is only slow."
    port = "" if endpoint.port == 22 else f"-p {endpoint.port} "
    found = ""
    if isinstance(error, LoginRefusedError):
        found = f" (it takes {', '.join(error.takes)})" if error.takes else ""
        found += "".join(f"; {key}" for key in error.unusable)
    return (
        f"{endpoint}: it accepts none of the keys offered for user {endpoint.username}{found}. Give the "
        f"right `username` and `key_file`, or run `ssh-copy-id {port}{endpoint.username}@{endpoint.host}`."
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
        return f"{endpoint}: connection refused. Start an SSH server there, or give its SSH group the right `port`."
    if error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH):
        return f"{endpoint}: there is no route to it. Is the machine up and on the network?"
    return f"{endpoint}: {error.strerror or error}. Try `{endpoint.ssh_command}`."
