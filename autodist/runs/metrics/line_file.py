"""A file of lines to which several starts of a script append."""

from __future__ import annotations

import os
from pathlib import Path

_BLOCK = 1 << 16


class LineFile:
    """Appends whole lines; a line that an earlier process has begun and not ended is removed.

    Args:
        path: the file; it is created.

    Raises:
        OSError: it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        size = os.fstat(self._descriptor).st_size
        whole = self._end_of_last_line(size)
        if whole < size:
            os.ftruncate(self._descriptor, whole)

    def add(self, line: str) -> None:
        """Appends a line in one write, so that a process that is killed leaves whole lines.

        Raises:
            OSError: it cannot be written, or only a part of it; or the file was removed.
        """
        if os.fstat(self._descriptor).st_nlink == 0:
            raise FileNotFoundError(f"{self._path} was removed")
        content = line.encode() + b"\n"
        written = os.write(self._descriptor, content)
        if written < len(content):
            raise OSError(f"{self._path}: only {written} of {len(content)} bytes could be written")

    def close(self) -> None:
        """Closes the file."""
        os.close(self._descriptor)

    def _end_of_last_line(self, size: int) -> int:
        end = size
        while end > 0:
            start = max(0, end - _BLOCK)
            position = os.pread(self._descriptor, end - start, start).rfind(b"\n")
            if position >= 0:
                return start + position + 1
            end = start
        return 0
