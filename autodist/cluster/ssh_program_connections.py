"""Connections that the `ssh` program holds, and commands that join one."""

from __future__ import annotations

import collections
import contextlib
import socket
import subprocess
import threading
import time
from collections.abc import Callable

from autodist.cluster.ssh_program_output import DONE, JOINED, OF_NO_CONNECTION, words_of

_CHUNK = 1 << 16
_MOST_LINES = 2000

# Seconds between two looks at whether anybody still wants a login that is under way.
_LOOK_INTERVAL = 0.25

# Seconds for the end of a program whose connection has ended, and for one whose end is certain.
_END_LIMIT = 1.0
_HERE_LIMIT = 10.0


class SessionRefusedError(Exception):
    """A connection takes no more commands; what was said of it."""


class Connection:
    """A login that the user's own program holds, or one of ours.

    Args:
        socket: by which commands join it; None: as the user's configuration says.
        program: that holds it; None: one that is not ours.
    """

    def __init__(self, socket: str | None, program: subprocess.Popen[bytes] | None) -> None:
        self.socket, self._program = socket, program
        self._lines: collections.deque[str] = collections.deque(maxlen=_MOST_LINES)
        self._changed = threading.Condition()
        self._is_silent = False
        self._reading: threading.Thread | None = None
        if program is not None:
            self._reading = threading.Thread(target=self._read, name="autodist-ssh", daemon=True)
            self._reading.start()

    @property
    def said(self) -> str:
        """Its lines so far."""
        with self._changed:
            return "\n".join(self._lines)

    def wait_until_done(self, limit: float, stays: Callable[[], bool]) -> bool:
        """Waits for the login and says whether it is done; it has ended, or the time is over, where it is not."""
        until = time.monotonic() + limit
        while time.monotonic() < until and stays():
            with self._changed:
                is_over = self._changed.wait_for(lambda: DONE in self._lines or self.has_ended(), _LOOK_INTERVAL)
                if is_over:
                    return DONE in self._lines
        return False

    def status(self) -> int | None:
        """Exit status of the program; None while it runs."""
        assert self._program is not None, "it is ours"
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._program.wait(_END_LIMIT)
        return None

    def close(self) -> None:
        """Ends the program."""
        if self._program is not None and self._reading is not None:
            self._program.kill()
            self._program.wait()
            self._reading.join(_HERE_LIMIT)

    @property
    def is_ours(self) -> bool:
        """Whether its program is ours."""
        return self._program is not None

    def has_ended(self) -> bool:
        """Whether it says no more."""
        return self._is_silent

    def _read(self) -> None:
        assert self._program is not None and self._program.stderr is not None, "it is a pipe"
        for line in self._program.stderr:
            with self._changed:
                self._lines.append(line.decode(errors="replace").rstrip("\r\n"))
                self._changed.notify_all()
        with self._changed:
            self._is_silent = True
            self._changed.notify_all()


class JoinedProgram:
    """A program that has joined a connection: its streams, of which the first two are one socket."""

    def __init__(self, login: Connection, program: subprocess.Popen[bytes], stream: socket.socket) -> None:
        assert program.stderr is not None, "it is a pipe"
        self.login, self.program, self.stream = login, program, stream
        self.errors = program.stderr

    def wait_until_joined(self, limit: float) -> None:
        """Returns when the server has taken the command.

        Raises:
            SessionRefusedError: it does not.
        """
        watch = threading.Timer(limit, self.program.kill)
        watch.start()
        said = []
        try:
            for line in self.errors:
                said.append(line.decode(errors="replace").rstrip("\r\n"))
                if JOINED in said[-1]:
                    return
        finally:
            watch.cancel()
        self.program.wait(_HERE_LIMIT)
        raise SessionRefusedError(words_of("\n".join(said), OF_NO_CONNECTION))

    def is_broken(self) -> bool:
        """Whether its end is that of the connection."""
        try:
            status = self.program.wait(_END_LIMIT)
        except subprocess.TimeoutExpired:
            return False
        if status >= 0 and status != 255:
            return False  # the command's own
        return self.login.status() is not None if self.login.is_ours else status == 255


class OverProgram:
    """A command that was started over the `ssh` program."""

    def __init__(self, host: str, joined: JoinedProgram) -> None:
        self._host, self._joined = host, joined

    def send(self, content: bytes) -> None:
        """As `Far.send`."""
        self._joined.stream.sendall(content)

    def receive(self) -> bytes:
        """As `Far.receive`."""
        try:
            return self._joined.stream.recv(_CHUNK)
        except ConnectionResetError:
            return b""  # it has ended before it has read all

    def receive_errors(self) -> bytes:
        """As `Far.receive_errors`."""
        try:
            return self._joined.errors.read1(_CHUNK)  # type: ignore[attr-defined]  # it is buffered
        except ValueError:  # the machine was left
            return b""

    def why_ended(self) -> str | None:
        """As `Far.why_ended`."""
        return f"the SSH connection to {self._host} broke" if self._joined.is_broken() else None

    def close(self) -> None:
        """As `Far.close`."""
        with contextlib.suppress(OSError):
            self._joined.stream.shutdown(socket.SHUT_WR)


class SftpSocket:
    """A socket as paramiko's reader of SFTP wants a connection: one whose limit of time counts."""

    def __init__(self, stream: socket.socket) -> None:
        self._stream = stream

    def send(self, content: bytes) -> int:
        try:
            return self._stream.send(content)
        except (BrokenPipeError, ConnectionResetError) as error:  # no fault of a file's
            raise EOFError("the connection was lost") from error

    def recv(self, size: int) -> bytes:
        try:
            return self._stream.recv(size)
        except ConnectionResetError:
            return b""

    def settimeout(self, seconds: float | None) -> None:
        self._stream.settimeout(seconds)

    def get_name(self) -> str:
        return "sftp"

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.shutdown(socket.SHUT_RDWR)
