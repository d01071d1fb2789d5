"""The script as a process of the agent, started under a guard."""

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

from autodist.cluster.firewall import Firewall
from autodist.cluster.ports import ReservedPort
from autodist.cluster.protocol import Exited, Heartbeat, Joined, Line, Message, Start, decode, encode
from autodist.cluster.script_client import CONTROL_VARIABLE
from autodist.cluster.timeouts import Stopwatch, heartbeat_interval
from autodist.waits import Event, start_thread

# A longer line is forwarded in pieces of this many bytes.
_MAX_LINE = 1 << 16

# Seconds for sending the last lines and the exit status, which a cut link may block.
_REPORT_LIMIT = 1.0

# Number of waits for more of the last lines, as long as each wait yields some.
_MAX_ROUNDS = 20


class LaunchedScript:
    """A running script: forwards its output and messages; `end` leaves none of its processes.

    Args:
        start: the command to run.
        reserved_port: the reserved port of its server; the script inherits the reservation.
        stop_timeout: seconds between SIGTERM and SIGKILL.
        send: called with `Line`, `Joined`, `Progress`, `Leaving`, `Done` and, last, `Exited`, from several threads.
        on_exit: called when all messages have been sent.

    Raises:
        FirewallError: the firewall of the port cannot be set.

    Attributes:
        began: time of the start, by `time.monotonic`.
    """

    def __init__(
        self,
        start: Start,
        reserved_port: ReservedPort,
        stop_timeout: float,
        send: Callable[[Message], None],
        on_exit: Callable[[], None],
    ) -> None:
        self._send, self._on_exit = send, on_exit
        # Held by the guard alone, which outlives the script and its server, however the agent ends.
        self._firewall = None if start.admitted is None else Firewall(reserved_port.port, start.admitted)
        held_by_guard = [] if self._firewall is None else [self._firewall.fileno()]
        self._heartbeat_interval = heartbeat_interval(start.membership.silence_timeout)
        self.began = time.monotonic()
        self._gone = Event()
        self._stopped_check: StoppedProcessCheck | None = None
        self._forwarded = 0  # lines; not exact, since two threads count without a lock, which is harmless
        self._control, theirs = socket.socketpair()
        self._reports, report_fd = os.pipe()
        # PYTHONUNBUFFERED: lines arrive when they are printed, and the last ones of a killed script are not lost.
        # PYTHONBREAKPOINT: `breakpoint()` works in the chief only, which has a terminal, unless another hook is set.
        environment = {"PYTHONBREAKPOINT": "0"} | os.environ | {"PYTHONUNBUFFERED": "1"} | dict(start.environment)
        environment.pop("PYTHONINSPECT", None)  # Python would wait for interactive input when the script has ended
        environment[CONTROL_VARIABLE] = f"{theirs.fileno()},{reserved_port.fileno()}"
        guard = [sys.executable, "-P", "-m", "autodist.cluster.guard", str(report_fd), environment[CONTROL_VARIABLE]]
        guard.append(str(stop_timeout))
        self._guard = subprocess.Popen(
            [*guard, sys.executable, *start.arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=start.directory,
            env=environment,
            pass_fds=(theirs.fileno(), reserved_port.fileno(), report_fd, *held_by_guard),
            start_new_session=True,
        )
        theirs.close()
        os.close(report_fd)
        if self._firewall is not None:
            self._firewall.release()
        reserved_port.release()
        self._pumps = [start_thread(f"script-{stream}", self._pump, stream) for stream in ("stdout", "stderr")]
        self._to_script: queue.SimpleQueue[Message] = queue.SimpleQueue()
        if not start.waits:
            self.send_to_script(start.membership)
        start_thread("client-writer", self._send_to_script)
        start_thread("worker-client", self._read_from_script)
        self._watch = start_thread("script", self._wait)

    def is_stopped(self) -> bool:
        """Returns True if the script's process is stopped; see `StoppedProcessCheck.is_stopped`."""
        return self._stopped_check is not None and self._stopped_check.is_stopped()

    def send_to_script(self, message: Message) -> None:
        """Sends a message to the script's worker client, which reads it when it has been created."""
        self._to_script.put(message)

    def end(self) -> None:
        """Ends the script if it still runs; returns when it has ended and its end has been sent to the coordinator."""
        assert self._guard.stdin is not None
        with contextlib.suppress(OSError):  # the script has ended
            self._control.shutdown(socket.SHUT_WR)  # first: then its worker client attributes the SIGTERM to the agent
        self._guard.stdin.close()
        self._gone.wait()
        self._watch.join(_REPORT_LIMIT)

    def _pump(self, stream: str) -> None:
        source: BinaryIO = getattr(self._guard, stream)
        while line := source.readline(_MAX_LINE):
            self._send(Line(stream, line.decode(errors="replace").rstrip("\r\n")))
            self._forwarded += 1

    def _send_to_script(self) -> None:
        try:
            while True:
                self._control.sendall(encode(self._to_script.get()))
        except OSError:
            return  # the script has ended, which `_wait` reports, or is about to be ended

    def _read_from_script(self) -> None:
        try:
            for line in self._control.makefile("rb"):
                message = decode(line)
                if isinstance(message, Joined):
                    start_thread("worker-client-heartbeat", self._send_heartbeats)
                self._send(message)
        except OSError:
            return  # the script has ended, which `_wait` reports

    def _send_heartbeats(self) -> None:
        """Sends heartbeats to the script after it has joined; never queues more than one."""
        while not self._gone.wait(self._heartbeat_interval):
            if self._to_script.empty():
                self.send_to_script(Heartbeat())

    def _wait(self) -> None:
        with os.fdopen(self._reports, "rb") as reports:
            numbers = []
            for line in reports:
                numbers.append(int(line))
                self._stopped_check = self._stopped_check or StoppedProcessCheck(numbers[0])
        guard_status = self._guard.wait()
        status = numbers[1] if len(numbers) == 2 else self._end_unguarded(numbers, guard_status)
        if self._firewall is not None:
            self._firewall.wait_until_removed()
        self._gone.set()
        for pump in self._pumps:
            self._wait_for_last_lines(pump)
        self._send(Exited(status))
        self._on_exit()

    def _wait_for_last_lines(self, pump: threading.Thread) -> None:
        """Returns when the script's output has been forwarded; a process that escaped may keep it open forever."""
        for _ in range(_MAX_ROUNDS):
            before, stopwatch = self._forwarded, Stopwatch()
            while self._forwarded == before and stopwatch.read() < _REPORT_LIMIT / 2:
                pump.join(_REPORT_LIMIT / 4)
                if not pump.is_alive():
                    return
            if self._forwarded == before:
                return

    def _end_unguarded(self, numbers: list[int], guard_status: int) -> int:
        """Ends the script if its guard was killed or could not start it; returns the exit status."""
        for group in numbers[:1]:
            try:
                os.killpg(group, 9)
            except ProcessLookupError:
                continue
        return guard_status or 1


# The states of a process in /proc that was stopped by a signal or a debugger.
_STOPPED = ("T", "t")


class StoppedProcessCheck:
    """Detects that a process is stopped (SIGSTOP, a debugger).

    Args:
        process: its process id.
    """

    def __init__(self, process: int) -> None:
        self._process = process
        self._last_state: tuple[str, int] | None = None

    def is_stopped(self) -> bool:
        """Returns True if the process is stopped and has not run since the last call.

        A single check is not enough: tools that limit a process's CPU time stop it many times a second.
        """
        before, self._last_state = self._last_state, _state_of(self._process)
        return self._last_state is not None and self._last_state == before and self._last_state[0] in _STOPPED


def _state_of(process: int) -> tuple[str, int] | None:
    """Returns Linux's state letter of a process ("S" if it sleeps) and its CPU time in ticks.

    None if there is no such process.
    """
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], int(fields[11]) + int(fields[12])
