"""Trail: files that are written come to the disk, and get their checksums, while the next are being written."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.pool import AsyncResult, ThreadPool
from types import TracebackType
from typing import Self

from autodist.checkpoint.checksums import checksum
from autodist.checkpoint.folder import number_of, sync

_AT_ONCE = 2
"""Files that are synced and read at the same time, beside what writes the next."""


class ChecksummedWrites:
    """A context in which each file that `follow` is told of is synced and summed; its threads end with it."""

    def __init__(self) -> None:
        self._pool: ThreadPool | None = None
        self._under_way: list[AsyncResult[tuple[int, str]]] = []

    def __enter__(self) -> Self:
        try:
            self._pool = ThreadPool(_AT_ONCE)
        except RuntimeError:  # at the end of the script, where later Pythons start no thread
            self._pool = None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.terminate()
            self._pool.join()

    def follow(self, path: str) -> None:
        """A file is written, and is not written to any more."""
        if self._pool is not None:
            self._under_way.append(self._pool.apply_async(_finished, (path,)))

    def checksums(self) -> dict[int, str]:
        """Of the files that were followed, once they are on the disk; by their numbers, since they get other names.

        Raises:
            OSError: one cannot be brought there, or read.
        """
        return dict(one.get() for one in self._under_way)


def _finished(path: str) -> tuple[int, str]:
    sync(path)
    return number_of(path), checksum(path)


Follow = Callable[[str], None]
"""Called with each file once it is written."""


def nobody(path: str) -> None:
    """Follows nothing."""
