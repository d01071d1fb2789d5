"""What the chief's terminal says while a run starts, which takes seconds to minutes."""

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
    """Tells what a run has done on its way to its first step, and shows on a terminal what it is doing.

    Args:
        is_chief: whether this is the process whose terminal it is.
    """

    def __init__(self, is_chief: bool) -> None:
        self._is_chief, self._is_over = is_chief, False
        self._began: float | None = None
        # Asked now: later what TensorFlow says is left out of standard error, which is no terminal for as long.
        self._has_terminal = is_chief and _is_terminal(sys.stderr)
        self._columns = _columns(sys.stderr) if self._has_terminal else 0
        self._live: rich.live.Live | None = None

    @property
    def columns(self) -> int | None:
        """How wide the terminal is that shows the log; None if none does, or it does not say."""
        return self._columns or None if is_shown_on_the_terminal(logging.INFO) else None

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Shows `what` beside a spinner while the context is open, until the first step has been made."""
        self.begins()
        if self._is_over or not self._has_terminal or not is_shown_on_the_terminal(logging.INFO):
            yield
            return
        spinner = rich.spinner.Spinner("dots", f"autodist: {what} …")
        if self._live is not None:  # within another one, which is shown again after it
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

    def has_done(self, what: str, *args: object) -> None:
        """Logs on the chief what is done, and after how many seconds; at level DEBUG once the first step is made."""
        if self._is_over and self._is_chief:
            log.debug(what, *args)
        elif self._is_chief:
            log.info(f"%5.1f s: {what}", time.monotonic() - self.begins(), *args)

    def ends(self) -> None:
        """The first step has been made; called again, nothing happens."""
        if not self._is_over and self._began is not None:
            self.has_done("the first step is made")
            self._is_over = True

    def begins(self) -> float:
        """The moment, by `time.monotonic`, from which the log counts seconds: that of the first call."""
        if self._began is None:
            self._began = time.monotonic()
        return self._began


def _is_terminal(stream: TextIO | None) -> bool:
    try:
        return stream is not None and os.isatty(stream.fileno())
    except (OSError, ValueError):  # no file, or a closed one
        return False


def _columns(stream: TextIO) -> int:
    """The width of a terminal, or what the environment says of it; 0 if that is not known."""
    told = os.environ.get("COLUMNS", "")
    return int(told) if told.isdecimal() and len(told) < 5 else os.get_terminal_size(stream.fileno()).columns


@contextmanager
def _live(spinner: rich.spinner.Spinner) -> Iterator[rich.live.Live]:
    """A line at the end of the terminal, that is gone afterwards; what is printed meanwhile goes above it."""
    console = rich.console.Console(stderr=True, force_terminal=True, force_jupyter=False)
    plain = sys.stdout, sys.stderr
    # What goes to a file or into a pipe is none of the terminal's.
    live = rich.live.Live(spinner, console=console, transient=True, redirect_stdout=_is_terminal(sys.stdout))
    _shown.append(plain)
    try:
        with live:
            yield live
    finally:
        _shown.remove(plain)


_shown: list[tuple[TextIO, TextIO]] = []


def _leave_alone() -> None:
    """A forked process writes to the outputs themselves: a thread that it lacks may hold the terminal's lock."""
    if _shown:
        sys.stdout, sys.stderr = _shown.pop()


os.register_at_fork(after_in_child=_leave_alone)
