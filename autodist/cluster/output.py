"""Workers' lines on the chief's own outputs."""

from __future__ import annotations

import io
import logging
import os
import select
import sys
import threading
from typing import TextIO

from rich.file_proxy import FileProxy

_log = logging.getLogger("autodist.cluster")


class Output:
    """Writes whole lines, each with the name of its worker before it.

    A line goes to the file descriptor in one piece, past Python's buffer: a line that the chief's script is in the
    middle of printing stays in that buffer and is not torn.

    Attributes:
        lines: how many were written so far.
    """

    def __init__(self) -> None:
        self._writing = threading.Lock()
        self._lost: set[str] = set()
        self.lines = 0

    def line(self, stream: str, name: str, text: str) -> None:
        """Writes one line to "stdout" or "stderr"; what cannot be written is lost, which is said once a stream.

        The run goes on, as the chief's script does, until it prints something itself.
        """
        whole = f"[{name}] {text}\n"
        with self._writing:
            self.lines += 1
            try:
                _write(getattr(sys, stream), whole)
            except (OSError, ValueError) as error:  # ValueError: the stream was closed
                if stream not in self._lost:
                    self._lost.add(stream)
                    _log.warning(
                        "the chief's %s takes no more (%s): lines of the other workers are lost", stream, error
                    )


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
