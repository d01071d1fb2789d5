"""SSH by the `ssh` program: one process holds the connection, and commands join it through its socket.

All login methods of the program work: agents, security keys, Kerberos, and connections that are already open.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from collections.abc import Callable
from typing import Self

import paramiko

from autodist.cluster.child_processes import ChildProcesses
from autodist.cluster.ssh_keys import read_key
from autodist.cluster.ssh_machine import ONE_TRY, SSHCommand, SSHMachine
from autodist.cluster.ssh_program import command_line, joining, master, require_program
from autodist.cluster.ssh_program_connections import Connection, ProgramCommand
from autodist.cluster.ssh_program_output import why_no_login
from autodist.cluster.ssh_route import Hop, find_route
from autodist.cluster.ssh_settings import SSHSettings
from autodist.errors import ClusterError

# Seconds for the answer of a local program, and for the end of one whose connection has ended.
_LOCAL_LIMIT = 10.0
_END_LIMIT = 1.0


class ProgramMachine(SSHMachine[Connection]):
    """A machine reached by the `ssh` program.

    Args:
        settings: SSH settings of the machine.
        wait_while_needed: waits so many seconds; returns False if the machine is no longer needed.
        timeout: seconds without a response that are allowed.
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
