"""SSH by the `ssh` program: one process holds the connection, and commands join it through its socket.

All login methods of the program work: agents, security keys, Kerberos, and connections that are already open.
"""

from __future__ import annotations

import collections
import contextlib
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Self

import paramiko

from autodist.cluster.child_processes import ChildProcesses
from autodist.cluster.ssh_keys import read_key
from autodist.cluster.ssh_machine import ONE_TRY, SessionRefusedError, SSHCommand, SSHMachine
from autodist.cluster.ssh_program import command_line, joining, master, require_program
from autodist.cluster.ssh_program_output import DONE, JOINED, OF_NO_CONNECTION, text_of_output, why_no_login
from autodist.cluster.ssh_route import Hop, find_route
from autodist.cluster.ssh_settings import SSHSettings
from autodist.errors import ClusterError
from autodist.waits import Condition, start_thread

_CHUNK = 1 << 16
_MAX_LINES = 2000

# Seconds between two checks that a login in progress is still needed.
_POLL_INTERVAL = 0.25

# Seconds for the end of a program whose connection has ended, and for the answer or the end of another local program.
_END_LIMIT = 1.0
_LOCAL_LIMIT = 10.0


class Connection:
    """A login held by a running `ssh` program, which AutoDist or the user has started.

    Args:
        socket: path of the socket through which commands join it; None for the one in the user's configuration.
        program: the program that holds it; None if it is the user's.
    """

    def __init__(self, socket: str | None, program: subprocess.Popen[bytes] | None) -> None:
        self.socket, self._program = socket, program
        self._lines: collections.deque[str] = collections.deque(maxlen=_MAX_LINES)
        self._changed = Condition()
        self._is_at_end = False
        self._reading: threading.Thread | None = None
        if program is not None:
            self._reading = start_thread("ssh", self._read)

    @property
    def output(self) -> str:
        """The program's output so far."""
        with self._changed:
            return "\n".join(self._lines)

    def wait_until_done(self, limit: float, stays: Callable[[], bool]) -> bool:
        """Waits for the login; returns False if the program has ended, or after `limit` seconds."""
        until = time.monotonic() + limit
        while time.monotonic() < until and stays():
            with self._changed:
                is_over = self._changed.wait_for(lambda: DONE in self._lines or self.has_ended(), _POLL_INTERVAL)
                if is_over:
                    return DONE in self._lines
        return False

    def status(self) -> int | None:
        """Returns the exit status of the program; None while it runs."""
        assert self._program is not None, "it is AutoDist's program"
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._program.wait(_END_LIMIT)
        return None

    def close(self) -> None:
        """Ends the program."""
        if self._program is not None and self._reading is not None:
            self._program.kill()
            self._program.wait()
            self._reading.join(_LOCAL_LIMIT)

    @property
    def is_ours(self) -> bool:
        """True if AutoDist has started the program."""
        return self._program is not None

    def has_ended(self) -> bool:
        """Returns True if the program has closed its output."""
        return self._is_at_end

    def _read(self) -> None:
        assert self._program is not None and self._program.stderr is not None, "stderr is a pipe"
        for line in self._program.stderr:
            with self._changed:
                self._lines.append(line.decode(errors="replace").rstrip("\r\n"))
                self._changed.notify_all()
        with self._changed:
            self._is_at_end = True
            self._changed.notify_all()


class ProgramCommand(SSHCommand):
    """A command started by a program that has joined a connection.

    Args:
        host: name of the machine, for messages.
        login: the connection.
        program: the program.
        stream: socket for its standard input and output.
    """

    def __init__(self, host: str, login: Connection, program: subprocess.Popen[bytes], stream: socket.socket) -> None:
        super().__init__(host, stream)
        assert program.stderr is not None, "stderr is a pipe"
        self._login, self._program, self._errors = login, program, program.stderr

    def wait_until_joined(self, limit: float) -> None:
        """Returns when the server has accepted the command.

        Raises:
            SessionRefusedError: the server refuses it, or does not answer within `limit` seconds.
        """
        watch = threading.Timer(limit, self._program.kill)
        watch.start()
        lines = []
        try:
            for line in self._errors:
                lines.append(line.decode(errors="replace").rstrip("\r\n"))
                if JOINED in lines[-1]:
                    return
        finally:
            watch.cancel()
        self._program.wait(_LOCAL_LIMIT)
        raise SessionRefusedError(text_of_output("\n".join(lines), OF_NO_CONNECTION))

    def receive_errors(self) -> bytes:
        try:
            return self._errors.read1(_CHUNK)  # type: ignore[attr-defined]  # it is buffered
        except ValueError:  # closed by `ProgramMachine.__exit__`
            return b""

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.stream.shutdown(socket.SHUT_WR)

    def _is_broken(self) -> bool:
        try:
            status = self._program.wait(_END_LIMIT)
        except subprocess.TimeoutExpired:
            return False
        if status >= 0 and status != 255:
            return False  # the exit status of the command
        return self._login.status() is not None if self._login.is_ours else status == 255


class ProgramMachine(SSHMachine[Connection]):
    """A machine reached by the `ssh` program.

    Args:
        settings: SSH settings of the machine.
        wait_while_needed: waits for a number of seconds; returns False if the machine is no longer needed.
        timeout: seconds without a response after which the connection counts as lost.
    """

    def __init__(self, settings: SSHSettings, wait_while_needed: Callable[[float], bool], timeout: float) -> None:
        super().__init__(settings, wait_while_needed)
        self._timeout = timeout
        self._child_processes = ChildProcesses()
        self._hops: list[Hop] = []
        self._streams: list[socket.socket] = []

    def __enter__(self) -> Self:
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

    def _start(self, command: str, is_subsystem: bool = False) -> SSHCommand:
        if not self._hops:
            require_program(self._settings.host)
            self._hops = find_route(self._settings, read_key)
            self._logins += self._open_already()
        return super()._start(command, is_subsystem)

    def _start_on(self, login: Connection, command: str, is_subsystem: bool) -> SSHCommand:
        ours, theirs = socket.socketpair()
        self._streams.append(ours)
        options = ["-s"] if is_subsystem else []
        with theirs:
            program = self._child_processes.start(
                [*joining(self._line(), login.socket), *options, "--", self._settings.host, command],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=subprocess.PIPE,
            )
        started = ProgramCommand(self._settings.host, login, program, ours)
        started.wait_until_joined(self._settings.connect_timeout)
        return started

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
        """Logs in; if only the server's banner is late, tries again with the full timeout."""
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
