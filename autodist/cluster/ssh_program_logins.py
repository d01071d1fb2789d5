"""Logins by the `ssh` program: one holds the connection, and the commands of the machine join it by its socket.

So the program's own ways to log in count: agents, security keys, Kerberos, and connections that are open already.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from collections.abc import Callable, Sequence

import paramiko

from autodist.cluster.child_processes import ChildProcesses
from autodist.cluster.known_hosts import find_known_keys
from autodist.cluster.ssh_connection import ONE_TRY, quote
from autodist.cluster.ssh_errors import UnknownHostKeyError, why_no_connection
from autodist.cluster.ssh_keys import LoginRefusedError, UnusableKeyError, load_key
from autodist.cluster.ssh_logins import patiently
from autodist.cluster.ssh_program import Hop, command_line, find_way, joining, log_of, master, require_program
from autodist.cluster.ssh_program_connections import (
    Connection,
    JoinedProgram,
    OverProgram,
    SessionRefusedError,
    SftpSocket,
)
from autodist.cluster.ssh_program_output import (
    OF_NO_CONNECTION,
    find_cause,
    is_logged_in,
    is_logging_in,
    unknown_cause,
    words_of,
)
from autodist.cluster.ssh_settings import SSHSettings, known_hosts_of
from autodist.errors import ClusterError

_CHUNK = 1 << 16

# Seconds for an answer of a program here, and for the end of one whose connection has ended.
_HERE_LIMIT = 10.0
_END_LIMIT = 1.0


class ProgramLogins:
    """Starts commands on one machine by the `ssh` program, as many over one login as its server allows.

    Args:
        settings: how the machine is reached.
        silence: seconds without a word that are no harm.
        stays_for: waits so many seconds and says whether whoever wants the commands is still there.
    """

    def __init__(self, settings: SSHSettings, silence: float, stays_for: Callable[[float], bool]) -> None:
        self._settings, self._silence, self._stays_for = settings, silence, stays_for
        self._companions = ChildProcesses()
        self._way: list[Hop] = []
        self._logins: list[Connection] = []
        self._streams: list[socket.socket] = []

    def __enter__(self) -> ProgramLogins:
        self._companions.__enter__()
        return self

    def __exit__(self, *about: object) -> None:
        for stream in self._streams:
            with contextlib.suppress(OSError):
                stream.shutdown(socket.SHUT_RDWR)  # whoever still reads it wakes
        try:
            self._companions.end()
            for login in self._logins:
                login.close()  # before the streams are closed that it reads
        finally:
            self._companions.__exit__()
            for stream in self._streams:
                stream.close()

    def start(self, command: Sequence[str], told: bytes) -> OverProgram:
        """Starts a command; see `Machine.start`."""
        joined = self._join((), quote(command))
        try:
            joined.stream.sendall(told)
        except OSError as error:
            raise ClusterError(f"{self._settings.host}: the SSH server starts no command: {error}") from error
        return OverProgram(self._settings.host, joined)

    def open_sftp(self) -> paramiko.SFTPClient:
        """Files there; see `Machine.open_sftp`."""
        stream = SftpSocket(self._join(("-s",), "sftp").stream)
        stream.settimeout(self._settings.connect_timeout)
        return paramiko.SFTPClient(stream)  # type: ignore[arg-type]  # it needs no more of a channel

    def ask(self, command: Sequence[str], limit: float) -> bytes:
        """What a command prints; see `Machine.ask`."""
        joined = self._join((), quote(command))
        joined.stream.shutdown(socket.SHUT_WR)
        joined.stream.settimeout(limit)
        said = b""
        while received := joined.stream.recv(_CHUNK):
            said += received
        return said

    def _join(self, options: Sequence[str], wanted: str) -> JoinedProgram:
        """A command on the newest connection, or on a new one where that takes no more."""
        if not self._logins:
            require_program(self._settings.host)
            self._way = find_way(self._settings)
            self._logins += self._open_already()
        for login in self._logins[-1:]:
            with contextlib.suppress(SessionRefusedError):
                return self._join_one(login, options, wanted)
        self._logins.append(patiently(self._log_in, self._settings.patience, self._stays_for))
        try:
            return self._join_one(self._logins[-1], options, wanted)
        except SessionRefusedError as error:
            raise ClusterError(f"{self._settings.host}: the SSH server starts no command: {error}") from error

    def _join_one(self, login: Connection, options: Sequence[str], wanted: str) -> JoinedProgram:
        ours, theirs = socket.socketpair()
        self._streams.append(ours)
        with theirs:
            program = self._companions.start(
                [*joining(self._line(), login.socket), *options, "--", self._settings.host, wanted],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=subprocess.PIPE,
            )
        joined = JoinedProgram(login, program, ours)
        joined.wait_until_joined(self._settings.connect_timeout)
        return joined

    def _open_already(self) -> list[Connection]:
        """The connection that the user has opened by hand, if there is one."""
        if self._way[0].options.control_path is None:
            return []
        asked = self._companions.start(
            [*joining(self._line(), None), "-O", "check", "--", self._settings.host],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            return [Connection(None, None)] if asked.wait(_HERE_LIMIT) == 0 else []
        except subprocess.TimeoutExpired:
            asked.kill()
            return []

    def _log_in(self) -> Connection:
        """Logs in once; what the server says may take longer than its port may."""
        whole = self._settings.connect_timeout
        try:
            return self._try(min(whole, ONE_TRY))
        except ClusterError as error:
            is_slow = isinstance(error.__cause__, paramiko.SSHException) and isinstance(
                error.__cause__.__context__, TimeoutError
            )
            if not is_slow or whole <= ONE_TRY:
                raise
        return self._try(whole)

    def _try(self, connect_timeout: float) -> Connection:
        path = os.path.join(self._companions.folder, str(len(self._logins)))
        program = self._companions.start(
            master(self._line(connect_timeout), path, self._settings.host),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        login = Connection(path, program)
        limit = (connect_timeout + self._settings.connect_timeout) * len(self._way)
        if login.wait_until_done(limit, lambda: self._stays_for(0)):
            return login
        with contextlib.suppress(subprocess.TimeoutExpired):
            program.wait(_END_LIMIT if login.has_ended() else 0)
        is_late = program.poll() is None
        login.close()
        status = None if is_late else program.returncode
        raise why_no_login(self._way, self._companions.folder, login.said, status)

    def _line(self, connect_timeout: float = ONE_TRY) -> list[str]:
        return command_line(self._way, self._silence, connect_timeout, self._companions.folder)


def why_no_login(way: Sequence[Hop], folder: str, said: str, status: int | None) -> ClusterError:
    """The error for a login that was not done.

    Args:
        way: to the machine.
        folder: where those programs that reach the jump hosts have written what they said.
        said: by the one that reaches the machine itself.
        status: how that ended; None: it took too long.
    """
    for number in range(1, len(way)):
        words = _content(log_of(folder, number))
        hop = way[-number]
        cause = find_cause(words)
        if isinstance(cause, paramiko.ChannelException):
            return _explained(cause, way[-number - 1])
        if cause is not None and not is_logged_in(words):
            return _explained(cause, hop)
    hop = way[0]
    if status is None:
        late = TimeoutError("timed out")
        return _explained(paramiko.AuthenticationException("timeout") if is_logging_in(said) else late, hop)
    cause = find_cause(said)
    command = hop.options.proxy_command
    if isinstance(cause, EOFError | ConnectionError) and command and "Remote protocol version" not in said:
        cause = paramiko.ProxyCommandFailure(command, words_of(said, OF_NO_CONNECTION) or "it ended")
    return _explained(cause or unknown_cause(said, status), hop)


def _explained(cause: Exception, hop: Hop) -> ClusterError:
    """The error for a cause, with those of the user's keys that are locked and were not refused."""
    if isinstance(cause, LoginRefusedError):
        files = [hop.settings.key_file] if hop.settings.key_file else hop.options.identity_files
        locked = {key.file: key for key in _locked([file for file in files if file not in cause.offered])}
        others = (key for key in cause.unusable if key.file not in locked)
        cause = LoginRefusedError(cause.offered, (*locked.values(), *others), cause.takes)
    if isinstance(cause, UnknownHostKeyError):
        known = find_known_keys(known_hosts_of(hop.settings, hop.options), [hop.endpoint.key_name])
        cause = UnknownHostKeyError(cause.key, known.bad_lines)
    error = why_no_connection(cause, hop.endpoint)
    error.__cause__ = cause
    return error


def _locked(files: Sequence[str]) -> list[UnusableKeyError]:
    found = []
    for file in filter(os.path.exists, files):
        try:
            load_key(file)
        except UnusableKeyError as error:
            found += [error] if error.is_locked else []
    return found


def _content(file: str) -> str:
    try:
        with open(file, errors="replace", newline="") as opened:
            return opened.read().replace("\r\n", "\n")
    except OSError:
        return ""  # it had nothing to say
