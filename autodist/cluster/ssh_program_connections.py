"""Connections held by an `ssh` program, and commands that join such a connection."""

from __future__ import annotations

import collections
import contextlib
import socket
import subprocess
import threading
import time
from collections.abc import Callable

from autodist.cluster.ssh_program_output import DONE, JOINED, OF_NO_CONNECTION, text_of_output

_CHUNK = 1 << 16
_MOST_LINES = 2000

# Seconds between two checks that a login in progress is still needed.
_POLL_INTERVAL = 0.25

# Seconds for the end of a program whose connection has ended, and of a killed program.
_END_LIMIT = 1.0
_LOCAL_LIMIT = 10.0


class SessionRefusedError(Exception):
    """Raised with the program's output when a connection accepts no more commands."""


class Connection:
    """A login held by an `ssh` program of AutoDist or of the user.

    Args:
        socket: path of the socket through which commands join it; None for the one in the user's configuration.
        program: the program that holds it; None if it is the user's.
    """

    def __init__(self, socket: str | None, program: subprocess.Popen[bytes] | None) -> None:
        self.socket, self._program = socket, program
        self._lines: collections.deque[str] = collections.deque(maxlen=_MOST_LINES)
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


class JoinedProgram:
    """A program that has joined a connection; `stream` is a socket for its standard input and output."""

    def __init__(self, login: Connection, program: subprocess.Popen[bytes], stream: socket.socket) -> None:
        assert program.stderr is not None, "stderr is a pipe"
        self.login, self.program, self.stream = login, program, stream
        self.errors = program.stderr

    def wait_until_joined(self, limit: float) -> None:
        """Returns when the server has accepted the command.

        Raises:
            SessionRefusedError: the server refuses it, or does not answer within `limit` seconds.
        """
        watch = threading.Timer(limit, self.program.kill)
        watch.start()
        lines = []
        try:
            for line in self.errors:
                lines.append(line.decode(errors="replace").rstrip("\r\n"))
                if JOINED in lines[-1]:
                    return
        finally:
            watch.cancel()
        self.program.wait(_LOCAL_LIMIT)
        raise SessionRefusedError(text_of_output("\n".join(lines), OF_NO_CONNECTION))

    def is_broken(self) -> bool:
        """Returns True if the program ended because the connection broke."""
        try:
            status = self.program.wait(_END_LIMIT)
        except subprocess.TimeoutExpired:
            return False
        if status >= 0 and status != 255:
            return False  # the exit status of the command
        return self.login.status() is not None if self.login.is_ours else status == 255


class ProgramCommand:
    """A command that was started with the `ssh` program."""

    def __init__(self, host: str, joined: JoinedProgram) -> None:
        self._host, self._joined = host, joined

    def send(self, content: bytes) -> None:
        """See `RemoteCommand.send`."""
        self._joined.stream.sendall(content)

    def receive(self) -> bytes:
        """See `RemoteCommand.receive`."""
        try:
            return self._joined.stream.recv(_CHUNK)
        except ConnectionResetError:
            return b""  # the program has ended before it has read all input

    def receive_errors(self) -> bytes:
        """See `RemoteCommand.receive_errors`."""
        try:
            return self._joined.errors.read1(_CHUNK)  # type: ignore[attr-defined]  # it is buffered
        except ValueError:  # closed by `ProgramLogins.__exit__`
            return b""

    def why_ended(self) -> str | None:
        """See `RemoteCommand.why_ended`."""
        return f"the SSH connection to {self._host} broke" if self._joined.is_broken() else None

    def close(self) -> None:
        """See `RemoteCommand.close`."""
        with contextlib.suppress(OSError):
            self._joined.stream.shutdown(socket.SHUT_WR)


class SftpSocket:
    """A socket with the interface of a channel that paramiko's SFTP client expects, including the timeout."""

    def __init__(self, stream: socket.socket) -> None:
        self._stream = stream

    def send(self, content: bytes) -> int:
        try:
            return self._stream.send(content)
        except (BrokenPipeError, ConnectionResetError) as error:  # not an error of a file
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
