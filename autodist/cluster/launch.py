"""A script started by the agent, under a guard."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from autodist.cluster.heartbeat_timeout import beat_interval
from autodist.cluster.load_adjusted_clock import Stopwatch
from autodist.cluster.ports import PortHeld
from autodist.cluster.protocol import Exited, Heartbeat, Joined, Line, Message, Start, decode, encode
from autodist.cluster.worker_client import CONTROL_VARIABLE

# A line without an end is passed on in pieces of this many bytes.
_LONGEST_LINE = 1 << 16

# In seconds: the last lines and the exit status may wait on a link that is cut.
_REPORT_LIMIT = 1.0

# How often more of the last lines is waited for, as long as some came.
_MOST_ROUNDS = 20


class LaunchedScript:
    """A running script: what it prints and says is passed on, and `end` leaves nothing of it.

    Args:
        start: what to run.
        held: the port of its server; the script inherits the hold.
        stop_timeout: seconds between asking it to end and ending it.
        send: called with `Line`, `Joined`, `Progress`, `Leaving`, `Done` and, last, `Exited`, from several threads.
        on_exit: called when all has been sent.

    Attributes:
        began: when it was started, by `time.monotonic`.
    """

    def __init__(
        self,
        start: Start,
        held: PortHeld,
        stop_timeout: float,
        send: Callable[[Message], None],
        on_exit: Callable[[], None],
    ) -> None:
        self._send, self._on_exit = send, on_exit
        self._beat_interval = beat_interval(start.join.silence_timeout)
        self.began = time.monotonic()
        self._gone = threading.Event()
        self._standing: Standing | None = None
        self._passed = 0  # lines; that some are lost of two threads' counts does no harm
        self._control, theirs = socket.socketpair()
        self._reports, report_fd = os.pipe()
        # PYTHONUNBUFFERED: lines arrive when they are printed, and the last ones of a killed script are not lost.
        # PYTHONBREAKPOINT: a `breakpoint()` is the chief's, where somebody types, unless another hook is asked for.
        environment = {"PYTHONBREAKPOINT": "0"} | os.environ | {"PYTHONUNBUFFERED": "1"} | dict(start.environment)
        environment.pop("PYTHONINSPECT", None)  # Python would wait for somebody who types, with the run's last word
        environment[CONTROL_VARIABLE] = f"{theirs.fileno()},{held.fileno()}"
        guard = [sys.executable, "-P", "-m", "autodist.cluster.guard", str(report_fd), environment[CONTROL_VARIABLE]]
        guard.append(str(stop_timeout))
        self._guard = subprocess.Popen(
            [*guard, sys.executable, *start.arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=start.directory,
            env=environment,
            pass_fds=(theirs.fileno(), held.fileno(), report_fd),
            start_new_session=True,
        )
        theirs.close()
        os.close(report_fd)
        held.release()
        self._pumps = [self._run(f"script-{stream}", self._pump, stream) for stream in ("stdout", "stderr")]
        self._to_tell: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.tell(start.join)
        self._run("member-told", self._tell_all)
        self._run("member", self._converse)
        self._watch = self._run("script", self._wait)

    def is_stopped(self) -> bool:
        """Whether the script's process stands, as `Standing` sees it."""
        return self._standing is not None and self._standing.is_stopped()

    def tell(self, message: Message) -> None:
        """Passes a message on to the script's member, which reads it once it is made."""
        self._to_tell.put(message)

    def end(self) -> None:
        """Ends the script, if it has not ended; returns when it has, and has been reported if anybody listens."""
        assert self._guard.stdin is not None
        with contextlib.suppress(OSError):  # it has ended
            self._control.shutdown(socket.SHUT_WR)  # first: so its member knows whose the SIGTERM is that comes then
        self._guard.stdin.close()
        self._gone.wait()
        self._watch.join(_REPORT_LIMIT)

    def _run(self, name: str, work: Callable[..., None], *arguments: object) -> threading.Thread:
        thread = threading.Thread(target=work, name=f"autodist-{name}", args=arguments, daemon=True)
        thread.start()
        return thread

    def _pump(self, stream: str) -> None:
        source: BinaryIO = getattr(self._guard, stream)
        while line := source.readline(_LONGEST_LINE):
            self._send(Line(stream, line.decode(errors="replace").rstrip("\r\n")))
            self._passed += 1

    def _tell_all(self) -> None:
        try:
            while True:
                self._control.sendall(encode(self._to_tell.get()))
        except OSError:
            return  # the script has ended, which is reported by itself, or is about to be ended

    def _converse(self) -> None:
        try:
            for line in self._control.makefile("rb"):
                message = decode(line)
                if isinstance(message, Joined):
                    self._run("member-beat", self._beat)
                self._send(message)
        except OSError:
            return  # the script has ended, which is reported by itself

    def _beat(self) -> None:
        """Sends the script heartbeats from when it reads them; none are queued behind one that it has not taken."""
        while not self._gone.wait(self._beat_interval):
            if self._to_tell.empty():
                self.tell(Heartbeat())

    def _wait(self) -> None:
        with os.fdopen(self._reports, "rb") as reports:
            numbers = []
            for line in reports:
                numbers.append(int(line))
                self._standing = self._standing or Standing(numbers[0])
        guard_status = self._guard.wait()
        status = numbers[1] if len(numbers) == 2 else self._end_unguarded(numbers, guard_status)
        self._gone.set()
        for pump in self._pumps:
            self._wait_for_last_lines(pump)
        self._send(Exited(status))
        self._on_exit()

    def _wait_for_last_lines(self, pump: threading.Thread) -> None:
        """Returns when all is passed on that the script has printed; a process that got away may hold its outputs."""
        for _ in range(_MOST_ROUNDS):
            before, stopwatch = self._passed, Stopwatch()
            while self._passed == before and stopwatch.read() < _REPORT_LIMIT / 2:
                pump.join(_REPORT_LIMIT / 4)
                if not pump.is_alive():
                    return
            if self._passed == before:
                return

    def _end_unguarded(self, numbers: list[int], guard_status: int) -> int:
        """Ends the script of a guard that was killed or could not start it."""
        for group in numbers[:1]:
            try:
                os.killpg(group, 9)
            except ProcessLookupError:
                continue
        return guard_status or 1


# As Linux calls what a signal or a tracer has stopped.
_STOPPED = ("T", "t")


class Standing:
    """Looks at one process from time to time.

    Args:
        process: its number.
    """

    def __init__(self, process: int) -> None:
        self._process = process
        self._seen: tuple[str, int] | None = None

    def is_stopped(self) -> bool:
        """Whether it is stopped (SIGSTOP, a debugger) and has not run since this was asked last.

        What limits a process's time of a processor stops it many times a second.
        """
        before, self._seen = self._seen, _state_of(self._process)
        return self._seen is not None and self._seen == before and self._seen[0] in _STOPPED


def _state_of(process: int) -> tuple[str, int] | None:
    """The letter by which Linux says what a process does, "S" where it sleeps, and for how many ticks it has run.

    None: there is no such process.
    """
    try:
        about = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return about[0], int(about[11]) + int(about[12])
