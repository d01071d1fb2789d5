"""Connections held by an `ssh` program, and commands that join such a connection."""

from __future__ import annotations

import collections
import contextlib
import socket
import subprocess
import threading
import time
from collections.abc import Callable

from autodist.cluster.ssh_machine import SessionRefusedError, SSHCommand
from autodist.cluster.ssh_program_output import DONE, JOINED, OF_NO_CONNECTION, text_of_output

_CHUNK = 1 << 16
_MAX_LINES = 2000

# Seconds between two checks that a login in progress is still needed.
_POLL_INTERVAL = 0.25

# Seconds for the end of a program whose connection has ended, and of a killed program.
_END_LIMIT = 1.0
_LOCAL_LIMIT = 10.0


class Connection:
    """A login held by an `ssh` program of AutoDist or of the user.

    Args:
        socket: path of the socket through which commands join it; None for the one in the user's configuration.
        program: the program that holds it; None if it is the user's.
    """

    def __init__(self, socket: str | None, program: subprocess.Popen[bytes] | None) -> None:
        self.socket, self._program = socket, program
        self._lines: collections.deque[str] = collections.deque(maxlen=_MAX_LINES)
        self._changed = threading.Condition()
        self._is_at_end = False
        self._reading: threading.Thread | None = None
        if program is not None:
            self._reading = threading.Thread(target=self._read, name="autodist-ssh", daemon=True)
            self._reading.start()

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
