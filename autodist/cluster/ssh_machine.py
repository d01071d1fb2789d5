"""A machine reached over SSH: starts commands over as few logins as possible, and retries logins that fail briefly."""

from __future__ import annotations

import contextlib
import itertools
import random
import shlex
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Generic, Self, TypeVar

import paramiko

from autodist.cluster.ssh_errors import has_hung_up, is_silent
from autodist.cluster.ssh_settings import SSHSettings
from autodist.errors import ClusterError

_Login = TypeVar("_Login")

ONE_TRY = 15.0
"""Seconds for reaching a port: the kernel's retries become ever slower, so a new attempt succeeds sooner."""

_CHUNK = 1 << 16

_MAX_PAUSE = 2.0

_chance = random.Random()
"""A separate generator: the script may have seeded `random` equally on all workers."""


class SessionRefusedError(Exception):
    """Raised with the server's or the program's message when a login accepts no more commands."""


class SSHCommand(ABC):
    """A command, or the SFTP server, that was started on a machine; implements `RemoteCommand` of `stream_relay`.

    Args:
        host: name of the machine, for messages.
        stream: its standard input and output.
    """

    def __init__(self, host: str, stream: paramiko.Channel | socket.socket) -> None:
        self._host, self.stream = host, stream

    @property
    def hint_of_silence(self) -> str:
        return f"; if `ssh {self._host} true` does not end, a start file or a `ForceCommand` of the login waits"

    def send(self, content: bytes) -> None:
        self.stream.sendall(content)

    def receive(self, size: int = _CHUNK) -> bytes:
        try:
            return self.stream.recv(size)
        except ConnectionResetError:
            return b""  # the `ssh` program has ended before it has read all input

    def why_ended(self) -> str | None:
        return f"the SSH connection to {self._host} broke" if self._is_broken() else None

    @abstractmethod
    def receive_errors(self) -> bytes: ...

    @abstractmethod
    def close(self) -> None: ...

    @abstractmethod
    def _is_broken(self) -> bool:
        """Returns True if the output ended because the connection broke."""


class _SFTPStream:
    """The stream of an SFTP server, with the methods and errors of a channel that paramiko's client expects."""

    def __init__(self, server: SSHCommand) -> None:
        self._server, self._stream = server, server.stream

    def recv(self, size: int) -> bytes:
        return self._server.receive(size)

    def settimeout(self, seconds: float | None) -> None:
        self._stream.settimeout(seconds)

    def send(self, content: bytes) -> int:
        try:
            return self._stream.send(content)
        except (BrokenPipeError, ConnectionResetError) as error:  # not an error of a file
            raise EOFError("the connection was lost") from error

    def get_name(self) -> str:
        return "sftp"

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.shutdown(socket.SHUT_RDWR)


class SSHMachine(ABC, Generic[_Login]):
    """A machine reached over SSH. As a context manager, it closes all connections at its exit.

    OpenSSH's server allows ten commands per login (`MaxSessions`), and drops connections if ten logins, of any client,
    are in progress (`MaxStartups`). So each login starts as many commands as the server allows.

    Args:
        settings: SSH settings of the machine.
        wait_while_needed: waits so many seconds; returns False if the machine is no longer needed.
    """

    def __init__(self, settings: SSHSettings, wait_while_needed: Callable[[float], bool]) -> None:
        self._settings, self._wait_while_needed = settings, wait_while_needed
        self._logins: list[_Login] = []

    def __enter__(self) -> Self:
        return self

    @abstractmethod
    def __exit__(self, *about: object) -> None: ...

    def start(self, command: Sequence[str], stdin: bytes) -> SSHCommand:
        """Starts a command.

        Args:
            command: the program and its arguments.
            stdin: first bytes of its standard input.

        Raises:
            ClusterError: names the host, the cause and the fix.
        """
        try:
            started = self._start(quote(command))
            started.send(stdin)
        except (paramiko.SSHException, OSError, EOFError) as error:
            raise self._no_command(error) from error
        return started

    def open_sftp(self) -> paramiko.SFTPClient:
        """Opens an SFTP session.

        Raises:
            ClusterError: names the host, the cause and the fix.
            paramiko.SSHException, OSError, EOFError: the server offers no SFTP.
        """
        started = self._start("sftp", is_subsystem=True)
        started.stream.settimeout(self._settings.connect_timeout)
        return paramiko.SFTPClient(_SFTPStream(started))  # type: ignore[arg-type]  # it uses no other methods

    def run(self, command: Sequence[str], limit: float) -> bytes:
        """Returns the output of a command.

        Args:
            command: the program and its arguments.
            limit: timeout in seconds.

        Raises:
            ClusterError, paramiko.SSHException, OSError, EOFError: the command gives no output in time.
        """
        started = self._start(quote(command))
        started.stream.shutdown(socket.SHUT_WR)
        started.stream.settimeout(limit)
        return b"".join(iter(started.receive, b""))

    def _start(self, command: str, is_subsystem: bool = False) -> SSHCommand:
        """Starts a command on the newest login, or on a new one if that accepts no more commands."""
        for login in self._logins[-1:]:
            try:
                return self._start_on(login, command, is_subsystem)
            except SessionRefusedError:
                pass
        self._logins.append(retry_login(self._log_in, self._settings.retry_limit, self._wait_while_needed))
        try:
            return self._start_on(self._logins[-1], command, is_subsystem)
        except SessionRefusedError as error:
            raise self._no_command(error) from error

    def _no_command(self, error: Exception) -> ClusterError:
        host = self._settings.host
        if isinstance(error, SessionRefusedError):
            fix = "let its sshd_config allow sessions (`MaxSessions` 1 or more)"
        else:
            fix = (
                "the login succeeded, and then the connection ended or did not respond; the server's log has the reason"
            )
        return ClusterError(f"{host}: the SSH server starts no command ({str(error) or type(error).__name__}); {fix}")

    @abstractmethod
    def _log_in(self) -> _Login:
        """Logs in once; raises a ClusterError whose cause shows if it may be transient."""

    @abstractmethod
    def _start_on(self, login: _Login, command: str, is_subsystem: bool) -> SSHCommand:
        """Starts a command, or a subsystem of the server; raises `SessionRefusedError` if the login accepts no more."""


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


def retry_login(log_in: Callable[[], _Login], retry_limit: float, wait_while_needed: Callable[[float], bool]) -> _Login:
    """Logs in, and retries after transient errors.

    Args:
        log_in: function that logs in or raises a ClusterError; the cause of the error shows if it may be transient.
        retry_limit: seconds after which it is not retried.
        wait_while_needed: waits so many seconds; returns False if the login is no longer needed.

    Raises:
        ClusterError: the error of the last attempt.
    """
    began = time.monotonic()
    for attempt in itertools.count(1):
        try:
            return log_in()
        except ClusterError as error:
            if not _is_transient(error):
                raise
            # The random factor spreads the logins to several machines through one jump host.
            pause = min(_MAX_PAUSE, 0.1 * 2**attempt) * _chance.uniform(0.5, 1)
            elapsed = time.monotonic() - began
            if elapsed + pause > retry_limit or not wait_while_needed(pause):
                raise type(error)(f"{error}{_attempts_text(error, attempt, elapsed)}") from error
    raise AssertionError("counting does not end")


def _attempts_text(error: ClusterError, attempts: int, seconds: float) -> str:
    """Returns the text to append to an error after several attempts."""
    if attempts == 1:
        return ""
    times = f"{attempts} times in {seconds:.0f} s"
    if has_hung_up(error.__cause__):
        return f" It hung up {times}: if it admits too few logins at once, raise `MaxStartups` in its sshd_config."
    return f" It was tried {times}; if machines take longer to boot, raise `connect_timeout`."


def _is_transient(error: ClusterError) -> bool:
    """Returns True if the machine may still be booting, or its server may be busy."""
    cause = error.__cause__
    if isinstance(cause, paramiko.ChannelException):
        return True
    # A late banner has been waited for long enough, and an unknown name will not resolve soon.
    is_permanent = isinstance(cause, paramiko.SSHException | socket.gaierror)
    return has_hung_up(cause) or (is_silent(cause) and not is_permanent)
