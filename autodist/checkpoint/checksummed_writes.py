"""ChecksummedWrites: flushes and checksums files while the next files are written."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.pool import AsyncResult, ThreadPool
from types import TracebackType
from typing import Self

from autodist.checkpoint.checksums import checksum
from autodist.checkpoint.folder import number_of, sync

_AT_ONCE = 2
"""Number of files flushed and read at the same time, while another is written."""


class ChecksummedWrites:
    """A context that flushes and checksums each file passed to `follow`; its threads end with the context."""

    def __init__(self) -> None:
        self._pool: ThreadPool | None = None
        self._under_way: list[AsyncResult[tuple[int, str]]] = []

    def __enter__(self) -> Self:
        try:
            self._pool = ThreadPool(_AT_ONCE)
        except RuntimeError:  # at the end of the script, when newer Python versions start no threads
            self._pool = None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.terminate()
            self._pool.join()

    def follow(self, path: str) -> None:
        """Starts the work for a file that is complete."""
        if self._pool is not None:
            self._under_way.append(self._pool.apply_async(_finished, (path,)))

    def checksums(self) -> dict[int, str]:
        """Waits until the files are on the disk; returns their checksums by inode, since the files will be renamed.

        Raises:
            OSError: a file cannot be flushed or read.
        """
        return dict(one.get() for one in self._under_way)


def _finished(path: str) -> tuple[int, str]:
    sync(path)
    return number_of(path), checksum(path)


Follow = Callable[[str], None]
"""Called with each complete file."""


def nobody(path: str) -> None:
    """Ignores the file."""
