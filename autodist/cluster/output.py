"""Workers' lines on the chief's own outputs."""

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

_log = logging.getLogger("autodist.cluster")

MOST_WAITING = 100_000
"""Lines that wait for an output that takes none, a terminal that was halted, say; what comes then is lost."""


class Output:
    """Writes whole lines, each with the name of its worker before it.

    A line goes to the file descriptor in one piece, past Python's buffer: a line that the chief's script is in the
    middle of printing stays in that buffer and is not torn. Under PYTHONUNBUFFERED, where `print` would write it word
    by word, the chief's outputs are buffered by lines from here on, as on a terminal. A thread of its own writes, so
    that what else workers say is heard while nobody reads what they print.

    Attributes:
        lines: how many came so far.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: collections.deque[tuple[str, str]] = collections.deque()
        self._writer: threading.Thread | None = None
        self._lost: set[str] = set()
        self._written = self._left_out = 0
        self.lines = 0
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper) and stream.write_through:
                stream.reconfigure(line_buffering=True, write_through=False)

    def line(self, stream: str, name: str, text: str) -> None:
        """Has one line written to "stdout" or "stderr"; what cannot be written is lost, which is said once a stream.

        The run goes on, as the chief's script does, until it prints something itself.
        """
        with self._changed:
            self.lines += 1
            if len(self._waiting) >= MOST_WAITING:
                self._left_out += 1
                return
            self._waiting.append((stream, f"[{name}] {text}\n"))
            if self._writer is None:
                self._writer = threading.Thread(target=self._write_all, name="autodist-output", daemon=True)
                self._writer.start()
            self._changed.notify_all()

    def drain(self, limit: float) -> bool:
        """Waits until all is written that came, or none has been for `limit` seconds; says whether it is."""
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
                stream, whole = self._waiting[0]
            try:
                _write(getattr(sys, stream), whole)
            except (OSError, ValueError) as error:  # ValueError: the stream was closed
                if stream not in self._lost:
                    self._lost.add(stream)
                    _log.warning(
                        "the chief's %s takes no more (%s): lines of the other workers are lost", stream, error
                    )
            with self._changed:
                left_out = self._left_out if len(self._waiting) == 1 else 0
                self._left_out -= left_out
            if left_out:
                _log.warning("%d lines of other workers were left out here: nobody took what came before", left_out)
            with self._changed:
                self._waiting.popleft()
                self._written += 1
                self._changed.notify_all()


def _write(target: TextIO | None, text: str) -> None:
    if target is None:
        return
    if isinstance(target, FileProxy):  # a spinner is shown, above which lines go
        target.write(text)
        return
    try:
        descriptor = target.fileno()
    except (io.UnsupportedOperation, AttributeError):  # a stand-in, as in a notebook or under redirect_stdout
        target.write(text)
        target.flush()
        return
    rest = text.encode(target.encoding or "utf-8", errors="replace")
    while rest:
        select.select([], [descriptor], [])  # whoever started the chief may have made its output non-blocking
        rest = rest[os.write(descriptor, rest[: select.PIPE_BUF]) :]
