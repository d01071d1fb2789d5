"""Writes the workers' output to the chief's standard output and error."""

from __future__ import annotations

import collections
import functools
import io
import logging
import os
import select
import sys
import threading
from typing import TextIO

from rich.file_proxy import FileProxy

from autodist.waits import Condition, start_thread

_log = logging.getLogger("autodist.cluster")

MAX_WAITING = 100_000
"""Limit on the lines queued for a blocked output, such as a halted terminal; further lines are dropped."""


class Output:
    """Writes whole lines, each prefixed with the name of its worker.

    A line is written to the file descriptor at once, bypassing Python's buffer. So it does not split a line that the
    chief's script is printing. Under PYTHONUNBUFFERED, where `print` would write word by word, the chief's outputs
    become line-buffered, as on a terminal. A separate thread writes, so that the other messages of workers are handled
    while an output is blocked.

    Attributes:
        lines: number of lines received so far.
    """

    def __init__(self) -> None:
        self._changed = Condition()
        self._waiting: collections.deque[tuple[str, str]] = collections.deque()
        self._writer: threading.Thread | None = None
        self._failed_streams: set[str] = set()
        self._written = self._dropped = 0
        self.lines = 0
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper) and stream.write_through:
                stream.reconfigure(line_buffering=True, write_through=False)

    def line(self, stream: str, name: str, text: str) -> None:
        """Queues one line for "stdout" or "stderr".

        Lines that cannot be written are dropped with one warning a stream; the run continues, as the chief's script
        does until it prints.
        """
        with self._changed:
            self.lines += 1
            if len(self._waiting) >= MAX_WAITING:
                self._dropped += 1
                return
            self._waiting.append((stream, f"[{name}] {text}\n"))
            if self._writer is None:
                self._writer = start_thread("output", self._write_all)
            self._changed.notify_all()

    def drain(self, limit: float) -> bool:
        """Waits until all lines are written (returns True), or none was written for `limit` seconds."""
        with self._changed:
            while self._waiting:
                if not self._changed.wait_for(functools.partial(self._is_beyond, self._written), limit):
                    return False
            return True

    def _is_beyond(self, written: int) -> bool:
        return self._written > written

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                stream, line = self._waiting[0]
            try:
                _write(getattr(sys, stream), line)
            except (OSError, ValueError) as error:  # ValueError: the stream was closed
                if stream not in self._failed_streams:
                    self._failed_streams.add(stream)
                    _log.warning(
                        "the chief's %s takes no more (%s): lines of the other workers are lost", stream, error
                    )
            with self._changed:
                dropped = self._dropped if len(self._waiting) == 1 else 0
                self._dropped -= dropped
            if dropped:
                _log.warning("%d lines of other workers were left out here: the output was blocked", dropped)
            with self._changed:
                self._waiting.popleft()
                self._written += 1
                self._changed.notify_all()


def _write(target: TextIO | None, text: str) -> None:
    if target is None:
        return
    if isinstance(target, FileProxy):  # a spinner is shown; lines are printed above it
        target.write(text)
        return
    try:
        descriptor = target.fileno()
    except (io.UnsupportedOperation, AttributeError):  # not a file, as in a notebook or under redirect_stdout
        target.write(text)
        target.flush()
        return
    rest = text.encode(target.encoding or "utf-8", errors="replace")
    while rest:
        select.select([], [descriptor], [])  # the chief's parent may have made its output non-blocking
        rest = rest[os.write(descriptor, rest[: select.PIPE_BUF]) :]
