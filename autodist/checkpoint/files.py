"""Files of a checkpoint: flushes them to the disk, and computes checksums that detect damage.

On every processor CRC-32 is several times faster than a disk; SHA-256 is so on only a few. The purpose is to detect
damage. TensorFlow's index has another checksum of each value, which it compares when it reads the value.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing.pool import AsyncResult, ThreadPool
from types import TracebackType
from typing import Any, Self, TypeVar

T = TypeVar("T")
R = TypeVar("R")

READERS = 4
"""Number of files read at the same time: more than cores, since the readers wait for the disk."""

_FLUSHED_AT_ONCE = 2
"""Number of files flushed and read at the same time, while another is written."""

_CHUNK = 4 << 20
_OWN = "crc32"


def checksums(paths: Iterable[str], readers: int = READERS) -> dict[str, str]:
    """Computes the CRC-32 of files, as eight hexadecimal digits.

    Raises:
        OSError: a file cannot be read.
    """
    listed = list(paths)
    return dict(zip(listed, in_threads(checksum, listed, readers), strict=True))


def checksum(path: str) -> str:
    """Computes the CRC-32 of a file, as eight hexadecimal digits.

    Raises:
        OSError: the file cannot be read.
    """
    found, chunk = 0, memoryview(bytearray(_CHUNK))
    with open(path, "rb", buffering=0) as opened:
        while length := opened.readinto(chunk):
            found = zlib.crc32(chunk[:length], found)
    return f"{found:08x}"


def sealed(content: Mapping[str, Any]) -> str:
    """Returns JSON of a mapping, with its own checksum."""
    plain = json.loads(json.dumps(content))  # with keys as text, as they will be read
    return json.dumps({**plain, _OWN: _checksum_of(plain)}, indent=1, sort_keys=True)


def unsealed(text: str) -> dict[str, Any]:
    """Returns the mapping in a text made by `sealed`.

    Raises:
        ValueError: the text was altered.
    """
    content = json.loads(text)
    if not isinstance(content, dict) or content.pop(_OWN, None) != _checksum_of(content):
        raise ValueError("it is not what was written: its checksum does not match")
    return content


def _checksum_of(plain: Mapping[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(plain, sort_keys=True).encode()):08x}"


class ChecksummedWrites:
    """A context that flushes and checksums each file passed to `follow`; its threads end with the context."""

    def __init__(self) -> None:
        self._pool: ThreadPool | None = None
        self._under_way: list[AsyncResult[tuple[int, str]]] = []

    def __enter__(self) -> Self:
        try:
            self._pool = ThreadPool(_FLUSHED_AT_ONCE)
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


def sync(path: str) -> None:
    """Flushes a file, or a folder's list of files, to the disk (`fsync`)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def number_of(path: str) -> int:
    """Returns a file's inode number, which a rename does not change."""
    return os.stat(path).st_ino


def in_threads(act: Callable[[T], R], values: Sequence[T], most: int) -> list[R]:
    """Calls `act` on each value, with at most `most` calls at the same time; also works after the script has ended."""
    threads = min(most, len(values))
    if threads > 1:
        try:  # an executor of `concurrent.futures` accepts no work after the script has ended
            pool = ThreadPool(threads)
        except RuntimeError:  # newer Python versions then start no threads at all
            threads = 1
        else:
            with pool:
                return pool.map(act, values, chunksize=1)
    return [act(value) for value in values]
