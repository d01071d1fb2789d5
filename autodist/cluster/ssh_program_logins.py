"""Logins with the `ssh` program: one process holds the connection, and commands join it through its socket.

All login methods of the program work: agents, security keys, Kerberos, and connections that are already open.
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
from autodist.cluster.ssh_hops import known_hosts_of
from autodist.cluster.ssh_keys import LoginRefusedError, UnusableKeyError, load_key
from autodist.cluster.ssh_logins import retry_login
from autodist.cluster.ssh_program import Hop, command_line, find_route, joining, log_of, master, require_program
from autodist.cluster.ssh_program_connections import (
    Connection,
    JoinedProgram,
    ProgramCommand,
    SessionRefusedError,
    SftpSocket,
)
from autodist.cluster.ssh_program_output import (
    OF_NO_CONNECTION,
    find_cause,
    is_logged_in,
    is_logging_in,
    text_of_output,
    unknown_cause,
)
from autodist.cluster.ssh_settings import SSHSettings
from autodist.errors import ClusterError

_CHUNK = 1 << 16

# Seconds for the answer of a local program, and for the end of one whose connection has ended.
_LOCAL_LIMIT = 10.0
_END_LIMIT = 1.0


class ProgramLogins:
    """Starts commands on one machine with the `ssh` program, as many over one login as its server allows.

    Args:
        settings: SSH settings of the machine.
        timeout: seconds without a response that are allowed.
        wait_while_needed: waits so many seconds; returns False if the login is no longer needed.
    """

    def __init__(self, settings: SSHSettings, timeout: float, wait_while_needed: Callable[[float], bool]) -> None:
        self._settings, self._timeout, self._wait_while_needed = settings, timeout, wait_while_needed
        self._child_processes = ChildProcesses()
        self._hops: list[Hop] = []
        self._logins: list[Connection] = []
        self._streams: list[socket.socket] = []

    def __enter__(self) -> ProgramLogins:
        self._child_processes.__enter__()
        return self

    def __exit__(self, *about: object) -> None:
        for stream in self._streams:
            with contextlib.suppress(OSError):
                stream.shutdown(socket.SHUT_RDWR)  # wakes threads that still read
        try:
            self._child_processes.end()
            for login in self._logins:
                login.close()  # before the streams that it reads are closed
        finally:
            self._child_processes.__exit__()
            for stream in self._streams:
                stream.close()

    def start(self, command: Sequence[str], stdin: bytes) -> ProgramCommand:
        """Starts a command; see `Machine.start`."""
        joined = self._join((), quote(command))
        try:
            joined.stream.sendall(stdin)
        except OSError as error:
            raise ClusterError(f"{self._settings.host}: the SSH server starts no command: {error}") from error
        return ProgramCommand(self._settings.host, joined)

    def open_sftp(self) -> paramiko.SFTPClient:
        """Opens an SFTP session; see `Machine.open_sftp`."""
        stream = SftpSocket(self._join(("-s",), "sftp").stream)
        stream.settimeout(self._settings.connect_timeout)
        return paramiko.SFTPClient(stream)  # type: ignore[arg-type]  # it uses no other methods of a channel

    def ask(self, command: Sequence[str], limit: float) -> bytes:
        """Returns the output of a command; see `Machine.ask`."""
        joined = self._join((), quote(command))
        joined.stream.shutdown(socket.SHUT_WR)
        joined.stream.settimeout(limit)
        output = b""
        while received := joined.stream.recv(_CHUNK):
            output += received
        return output

    def _join(self, options: Sequence[str], command: str) -> JoinedProgram:
        """Starts a command on the newest connection, or on a new one if that accepts no more commands."""
        if not self._logins:
            require_program(self._settings.host)
            self._hops = find_route(self._settings)
            self._logins += self._open_already()
        for login in self._logins[-1:]:
            with contextlib.suppress(SessionRefusedError):
                return self._join_one(login, options, command)
        self._logins.append(retry_login(self._log_in, self._settings.patience, self._wait_while_needed))
        try:
            return self._join_one(self._logins[-1], options, command)
        except SessionRefusedError as error:
            raise ClusterError(f"{self._settings.host}: the SSH server starts no command: {error}") from error

    def _join_one(self, login: Connection, options: Sequence[str], command: str) -> JoinedProgram:
        ours, theirs = socket.socketpair()
        self._streams.append(ours)
        with theirs:
            program = self._child_processes.start(
                [*joining(self._line(), login.socket), *options, "--", self._settings.host, command],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=subprocess.PIPE,
            )
        joined = JoinedProgram(login, program, ours)
        joined.wait_until_joined(self._settings.connect_timeout)
        return joined

    def _open_already(self) -> list[Connection]:
        """Returns the connection that the user has opened manually, if there is one."""
        if self._hops[0].options.control_path is None:
            return []
        check = self._child_processes.start(
            [*joining(self._line(), None), "-O", "check", "--", self._settings.host],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            return [Connection(None, None)] if check.wait(_LOCAL_LIMIT) == 0 else []
        except subprocess.TimeoutExpired:
            check.kill()
            return []

    def _log_in(self) -> Connection:
        """Logs in once; the timeout of the server's banner may be longer than that of its port."""
        timeout = self._settings.connect_timeout
        try:
            return self._try(min(timeout, ONE_TRY))
        except ClusterError as error:
            is_slow = isinstance(error.__cause__, paramiko.SSHException) and isinstance(
                error.__cause__.__context__, TimeoutError
            )
            if not is_slow or timeout <= ONE_TRY:
                raise
        return self._try(timeout)

    def _try(self, connect_timeout: float) -> Connection:
        path = os.path.join(self._child_processes.folder, str(len(self._logins)))
        program = self._child_processes.start(
            master(self._line(connect_timeout), path, self._settings.host),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        login = Connection(path, program)
        limit = (connect_timeout + self._settings.connect_timeout) * len(self._hops)
        if login.wait_until_done(limit, lambda: self._wait_while_needed(0)):
            return login
        with contextlib.suppress(subprocess.TimeoutExpired):
            program.wait(_END_LIMIT if login.has_ended() else 0)
        is_late = program.poll() is None
        login.close()
        status = None if is_late else program.returncode
        raise why_no_login(self._hops, self._child_processes.folder, login.output, status)

    def _line(self, connect_timeout: float = ONE_TRY) -> list[str]:
        return command_line(self._hops, self._timeout, connect_timeout, self._child_processes.folder)


def why_no_login(route: Sequence[Hop], folder: str, output: str, status: int | None) -> ClusterError:
    """Returns the error for a failed login.

    Args:
        route: the machine, then its jump hosts, as `find_route` returns them.
        folder: folder with the output of the programs that connect to the jump hosts.
        output: output of the program that connects to the machine.
        status: exit status of that program; None if it took too long.
    """
    for number in range(1, len(route)):
        log = _content(log_of(folder, number))
        hop = route[-number]
        cause = find_cause(log)
        if isinstance(cause, paramiko.ChannelException):
            return _explained(cause, route[-number - 1])
        if cause is not None and not is_logged_in(log):
            return _explained(cause, hop)
    hop = route[0]
    if status is None:
        late = TimeoutError("timed out")
        return _explained(paramiko.AuthenticationException("timeout") if is_logging_in(output) else late, hop)
    cause = find_cause(output)
    command = hop.options.proxy_command
    if isinstance(cause, EOFError | ConnectionError) and command and "Remote protocol version" not in output:
        cause = paramiko.ProxyCommandFailure(command, text_of_output(output, OF_NO_CONNECTION) or "it ended")
    return _explained(cause or unknown_cause(output, status), hop)


def _explained(cause: Exception, hop: Hop) -> ClusterError:
    """Returns the error for a cause; adds the user's locked keys that were not refused."""
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
    errors = []
    for file in filter(os.path.exists, files):
        try:
            load_key(file)
        except UnusableKeyError as error:
            errors += [error] if error.is_locked else []
    return errors


def _content(file: str) -> str:
    try:
        with open(file, errors="replace", newline="") as opened:
            return opened.read().replace("\r\n", "\n")
    except OSError:
        return ""  # the program has written nothing
