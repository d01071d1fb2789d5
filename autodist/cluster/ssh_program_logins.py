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
from autodist.cluster.ssh_connection import ONE_TRY, quote
from autodist.cluster.ssh_logins import patiently
from autodist.cluster.ssh_program import Hop, command_line, find_way, joining, master, require_program
from autodist.cluster.ssh_program_connections import (
    Connection,
    JoinedProgram,
    OverProgram,
    SessionRefusedError,
    SftpSocket,
)
from autodist.cluster.ssh_program_failures import why_no_login
from autodist.cluster.ssh_settings import SSHSettings
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
