"""A child process that ends with this process or with the call; its output is shown here as it arrives.

It is started, never forked, under the same guard as workers: however this process ends, no child process is left.
"""

from __future__ import annotations

import codecs
import logging
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import IO

from autodist.logs.tensorflow_log import LINE_TIMEOUT, RoutineLineFilter

_log = logging.getLogger("autodist")

FILES = "AUTODIST_LAUNCHED"
"""Environment variable of the process: the file descriptors of its order and of its outcome."""

_PIECE = 1 << 16


@dataclass(frozen=True)
class Ended:
    """The result of a process.

    Attributes:
        status: exit status; a negative one is the number of a signal.
        outcome: content of its outcome file; b"" if it wrote none.
        interrupt: the Ctrl-C that arrived meanwhile and was passed on to the process.
    """

    status: int
    outcome: bytes
    interrupt: KeyboardInterrupt | None


def run_module(module: str, order: bytes, stop_timeout: float) -> Ended:
    """Runs `python -m module` in a new process, and shows its output in this process's streams.

    The first Ctrl-C is passed on to the process, which may handle it; the second one ends it.

    Args:
        module: the module to run.
        order: content of the first file that `FILES` names; the process writes its outcome into the second.
        stop_timeout: seconds between SIGTERM and SIGKILL, if the process must be ended.

    Raises:
        KeyboardInterrupt: the second one.
    """
    with _file_in_memory("order") as ordered, _file_in_memory("outcome") as outcome:
        ordered.write(order)
        ordered.seek(0)
        with _started(module, (ordered, outcome), stop_timeout) as process:
            interrupt = process.show_all()
        outcome.seek(0)
        return Ended(process.status, outcome.read(), interrupt)


def _file_in_memory(name: str) -> IO[bytes]:
    """Opens a file in memory: a full disk cannot lose the outcome, and no file is left behind."""
    return os.fdopen(os.memfd_create(f"autodist-{name}"), "w+b")


class _Process:
    """The guard of the new process, seen from its parent.

    Attributes:
        status: exit status, after `end` has returned.
    """

    def __init__(self, guard: subprocess.Popen[bytes], reports: int) -> None:
        self._guard, self._reports = guard, reports
        self._reported, self._is_over = b"", False
        self.status = 1
        assert guard.stdout is not None and guard.stderr is not None, "both are pipes"
        self._selector = selectors.DefaultSelector()
        self._errors = _ShownErrors("stderr")
        self._selector.register(guard.stdout, selectors.EVENT_READ, _Shown("stdout"))
        self._selector.register(guard.stderr, selectors.EVENT_READ, self._errors)
        self._selector.register(reports, selectors.EVENT_READ)

    def show_all(self) -> KeyboardInterrupt | None:
        """Shows the output until the process and its children have ended; returns the Ctrl-C passed on to it."""
        try:
            self._show()
        except KeyboardInterrupt as interrupt:
            _log.info(
                "interrupted: the function may still handle the interrupt; interrupt again to end the run at once"
            )
            self._await_start()
            if group := self._group:
                with suppress(ProcessLookupError):
                    os.kill(group, signal.SIGINT)
            self._show()
            return interrupt
        return None

    def end(self) -> None:
        """Ends the process if it still runs; returns when, by its guard, no child process is left."""
        self._let_go()
        self._selector.close()
        while piece := os.read(self._reports, _PIECE):
            self._reported += piece
        os.close(self._reports)
        guarded = self._guard.wait()
        if len(self._reported.split()) == 2:
            self.status = int(self._reported.split()[1])
        else:  # the guard itself was killed
            self.status = guarded or 1
            if group := self._group:
                with suppress(ProcessLookupError):
                    os.killpg(group, signal.SIGKILL)
        for pipe in (self._guard.stdout, self._guard.stderr):
            assert pipe is not None
            pipe.close()

    @property
    def _group(self) -> int | None:
        """Process id and group id of the process, once the guard has reported it."""
        lines = self._reported.split(b"\n")
        return int(lines[0]) if len(lines) > 1 else None

    def _let_go(self) -> None:
        assert self._guard.stdin is not None
        self._guard.stdin.close()

    def _await_start(self) -> None:
        """Returns when the guard has reported the process, whose output may come first, or has ended."""
        while self._group is None and not self._is_over:
            self._show_some(None)

    def _show(self) -> None:
        """Returns when the guard has ended and all output until then is shown."""
        while not self._is_over:
            if not self._show_some(LINE_TIMEOUT if self._errors.is_holding else None):
                self._errors.show_held()
        while self._show_some(0.0):
            pass
        self._errors.show_held()

    def _show_some(self, timeout: float | None) -> bool:
        """Shows one piece of each stream that has data; returns True if any had."""
        events = self._selector.select(timeout)
        for key, _ in events:
            piece = os.read(key.fd, _PIECE)
            if key.fd == self._reports:
                self._reported += piece
                self._is_over = not piece
            else:
                key.data.show(piece)
            if not piece:
                self._selector.unregister(key.fileobj)
        return bool(events)


class _Shown:
    """One output stream of the process.

    Args:
        name: "stdout" or "stderr"; shown in the same stream of this process, which is looked up for each piece, since
            a notebook replaces it for each cell.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def show(self, piece: bytes) -> None:
        """Shows a piece; an empty piece flushes an incomplete last character."""
        target = getattr(sys, self._name)
        if target is not None and (text := self._decoder.decode(piece, final=not piece)):
            target.write(text)
            target.flush()


class _ShownErrors(_Shown):
    """The error output, without TensorFlow's routine lines, as other workers' agents filter theirs."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._lines = RoutineLineFilter()

    @property
    def is_holding(self) -> bool:
        """True if the start of a line is held back."""
        return bool(self._lines.held)

    def show(self, piece: bytes) -> None:
        shown = piece if _log.isEnabledFor(logging.DEBUG) else self._lines.filter(piece)
        if shown:
            super().show(shown)
        if not piece:
            super().show(b"")

    def show_held(self) -> None:
        super().show(self._lines.take_held())


@contextmanager
def _started(module: str, files: tuple[IO[bytes], IO[bytes]], stop_timeout: float) -> Iterator[_Process]:
    """Context manager that runs the process."""
    handed = [file.fileno() for file in files]
    # PYTHONBREAKPOINT and PYTHONINSPECT are disabled, since nobody can type there.
    environment = {"PYTHONBREAKPOINT": "0"} | os.environ | {"PYTHONIOENCODING": "utf-8"}
    environment[FILES] = ",".join(map(str, handed))
    environment.pop("PYTHONINSPECT", None)
    reports, report = os.pipe()
    guard = ["-P", "-m", "autodist.cluster.guard", str(report), environment[FILES], str(stop_timeout)]
    try:
        started = subprocess.Popen(
            # Started by a shell, since debuggers attach to commands that start Python.
            ["/bin/sh", "-c", 'exec "$0" "$@"', sys.executable, *guard, sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            pass_fds=(*handed, report),
            start_new_session=True,
        )
    except BaseException:
        os.close(reports)
        raise
    finally:
        os.close(report)
    process = _Process(started, reports)
    try:
        yield process
    finally:
        process.end()
