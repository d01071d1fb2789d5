"""Progress messages on the chief's terminal while a run starts, which takes seconds to minutes."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

import rich.console
import rich.live
import rich.spinner

from autodist.logs.terminal import is_shown_on_the_terminal

log = logging.getLogger("autodist")


class StartupProgress:
    """Logs the finished phases before the first step, and shows the current one on a terminal.

    Args:
        is_chief: True in the process that owns the terminal.
    """

    def __init__(self, is_chief: bool) -> None:
        self._is_chief, self._is_over = is_chief, False
        self._began: float | None = None
        # Checked now: later, standard error is replaced to filter TensorFlow's output, and is then no terminal.
        self._has_terminal = is_chief and _is_terminal(sys.stderr)
        self._columns = _columns(sys.stderr) if self._has_terminal else 0
        self._live: rich.live.Live | None = None

    @property
    def columns(self) -> int | None:
        """Width of the terminal that shows the log; None if there is no terminal or its width is unknown."""
        return self._columns or None if is_shown_on_the_terminal(logging.INFO) else None

    @contextmanager
    def showing(self, what: str) -> Iterator[None]:
        """Context that shows `what` next to a spinner, until the first step has finished."""
        self.start()
        if self._is_over or not self._has_terminal or not is_shown_on_the_terminal(logging.INFO):
            yield
            return
        spinner = rich.spinner.Spinner("dots", f"autodist: {what} …")
        if self._live is not None:  # nested: the outer text is restored afterwards
            before = self._live.renderable
            self._live.update(spinner, refresh=True)
            try:
                yield
            finally:
                self._live.update(before)
            return
        with _live(spinner) as live:
            self._live = live
            try:
                yield
            finally:
                self._live = None

    def log_done(self, what: str, *args: object) -> None:
        """Logs a finished phase and its seconds on the chief; at level DEBUG once the first step has finished."""
        if self._is_over and self._is_chief:
            log.debug(what, *args)
        elif self._is_chief:
            log.info(f"%5.1f s: {what}", time.monotonic() - self.start(), *args)

    def finish(self) -> None:
        """Logs that the first step has finished; has no effect when called again."""
        if not self._is_over and self._began is not None:
            self.log_done("first step finished")
            self._is_over = True

    def start(self) -> float:
        """Returns the start of the log's clock, by `time.monotonic`: the time of the first call."""
        if self._began is None:
            self._began = time.monotonic()
        return self._began


def _is_terminal(stream: TextIO | None) -> bool:
    try:
        return stream is not None and os.isatty(stream.fileno())
    except (OSError, ValueError):  # no file, or a closed one
        return False


def _columns(stream: TextIO) -> int:
    """Returns the width of a terminal, or the environment's `COLUMNS`; 0 if unknown."""
    columns = os.environ.get("COLUMNS", "")
    return int(columns) if columns.isdecimal() and len(columns) < 5 else os.get_terminal_size(stream.fileno()).columns


@contextmanager
def _live(spinner: rich.spinner.Spinner) -> Iterator[rich.live.Live]:
    """Shows a transient line at the bottom of the terminal; text printed meanwhile appears above it."""
    console = rich.console.Console(stderr=True, force_terminal=True, force_jupyter=False)
    plain = sys.stdout, sys.stderr
    # Output that goes to a file or pipe must not be redirected to the terminal.
    live = rich.live.Live(spinner, console=console, transient=True, redirect_stdout=_is_terminal(sys.stdout))
    _shown.append(plain)
    try:
        with live:
            yield live
    finally:
        _shown.remove(plain)


_shown: list[tuple[TextIO, TextIO]] = []


def _restore_streams() -> None:
    """Restores the plain streams in a forked process: a thread that it lacks may hold the terminal's lock."""
    if _shown:
        sys.stdout, sys.stderr = _shown.pop()


os.register_at_fork(after_in_child=_restore_streams)
