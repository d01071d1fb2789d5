"""A new process whose output is shown here as it comes, and that ends when this process, or the call, does.

It is started, never forked, under the guard that workers have: however this process ends, nothing of it is left.
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

_log = logging.getLogger("autodist")

FILES = "AUTODIST_LAUNCHED"
"""Environment variable of the process: file descriptors of what it is to do, and for what becomes of that."""

_PIECE = 1 << 16


@dataclass(frozen=True)
class Ended:
    """What became of a process.

    Attributes:
        status: exit status; a negative one is the number of a signal.
        outcome: what it left; b"" if it came to nothing.
        interrupt: the Ctrl-C that came here meanwhile, and that it was told of.
    """

    status: int
    outcome: bytes
    interrupt: KeyboardInterrupt | None


def run_module(module: str, order: bytes, stop_timeout: float) -> Ended:
    """Runs `python -m module` in a new process, and shows what it prints in this one's outputs.

    A first Ctrl-C is passed on, for the process to end as it likes; a second one ends it.

    Args:
        module: what to run.
        order: what it is to do, in the first of the files that `FILES` names; what it leaves goes to the second.
        stop_timeout: seconds between asking it to end and ending it, where it has to.

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
    """A file on no disk, which may be full: what a run has trained is not lost by that, and nothing is left of it."""
    return os.fdopen(os.memfd_create(f"autodist-{name}"), "w+b")


class _Process:
    """The guard of the new process, as its parent has it.

    Attributes:
        status: exit status, once `end` has returned.
    """

    def __init__(self, guard: subprocess.Popen[bytes], reports: int) -> None:
        self._guard, self._reports = guard, reports
        self._said, self._is_over = b"", False
        self.status = 1
        assert guard.stdout is not None and guard.stderr is not None, "they are pipes"
        self._selector = selectors.DefaultSelector()
        for name, pipe in (("stdout", guard.stdout), ("stderr", guard.stderr)):
            self._selector.register(pipe, selectors.EVENT_READ, _Shown(name))
        self._selector.register(reports, selectors.EVENT_READ)

    def show_all(self) -> KeyboardInterrupt | None:
        """Shows what is printed until nothing of the process is left; returns the Ctrl-C that was passed on to it."""
        try:
            self._show()
        except KeyboardInterrupt as interrupt:
            _log.info("interrupted: the run ends as its function lets it; interrupt again to end it at once")
            if group := self._group:
                with suppress(ProcessLookupError):
                    os.kill(group, signal.SIGINT)
            else:
                self._let_go()
            self._show()
            return interrupt
        return None

    def end(self) -> None:
        """Ends the process if it has not ended, and returns when nothing of it is left, as its guard promises."""
        self._let_go()
        self._selector.close()
        while piece := os.read(self._reports, _PIECE):
            self._said += piece
        os.close(self._reports)
        guarded = self._guard.wait()
        if len(self._said.split()) == 2:
            self.status = int(self._said.split()[1])
        else:  # the guard itself was ended
            self.status = guarded or 1
            if group := self._group:
                with suppress(ProcessLookupError):
                    os.killpg(group, signal.SIGKILL)
        for pipe in (self._guard.stdout, self._guard.stderr):
            assert pipe is not None
            pipe.close()

    @property
    def _group(self) -> int | None:
        """Number of the process, and of its group, once that was told."""
        told = self._said.split(b"\n")
        return int(told[0]) if len(told) > 1 else None

    def _let_go(self) -> None:
        assert self._guard.stdin is not None
        self._guard.stdin.close()

    def _show(self) -> None:
        """Returns when the guard has ended, and all is shown that was printed by then."""
        while not self._is_over:
            self._show_some(None)
        while self._show_some(0.0):
            pass

    def _show_some(self, timeout: float | None) -> bool:
        """Shows one piece of each output that has one; says whether there was anything."""
        events = self._selector.select(timeout)
        for key, _ in events:
            piece = os.read(key.fd, _PIECE)
            if key.fd == self._reports:
                self._said += piece
                self._is_over = not piece
            else:
                key.data.show(piece)
            if not piece:
                self._selector.unregister(key.fileobj)
        return bool(events)


class _Shown:
    """One output of the process.

    Args:
        name: "stdout" or "stderr", of which each is shown in this process's own; that is looked up again for each
            piece, since a notebook has one for each cell.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def show(self, piece: bytes) -> None:
        """Shows it, or, where it is empty, what is left of the last character."""
        target = getattr(sys, self._name)
        if target is not None and (text := self._decoder.decode(piece, final=not piece)):
            target.write(text)
            target.flush()


@contextmanager
def _started(module: str, files: tuple[IO[bytes], IO[bytes]], stop_timeout: float) -> Iterator[_Process]:
    """The process while the context is open."""
    handed = [file.fileno() for file in files]
    # PYTHONBREAKPOINT: nobody types there. PYTHONINSPECT: likewise.
    environment = {"PYTHONBREAKPOINT": "0"} | os.environ | {"PYTHONIOENCODING": "utf-8"}
    environment[FILES] = ",".join(map(str, handed))
    environment.pop("PYTHONINSPECT", None)
    reports, report = os.pipe()
    guard = ["-P", "-m", "autodist.cluster.guard", str(report), environment[FILES], str(stop_timeout)]
    try:
        started = subprocess.Popen(
            # By a shell, since debuggers go after what starts Python.
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
