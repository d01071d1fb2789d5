"""Threads for what waits for the disk, or computes while Python does other things."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from multiprocessing.pool import ThreadPool
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def in_threads(act: Callable[[T], R], values: Sequence[T], most: int) -> list[R]:
    """What `act` gives for each value, for at most so many at the same time; also when the script has ended."""
    threads = min(most, len(values))
    if threads > 1:
        try:  # an executor of `concurrent.futures` takes nothing when the script has ended
            pool = ThreadPool(threads)
        except RuntimeError:  # later Pythons start no thread at all then
            threads = 1
        else:
            with pool:
                return pool.map(act, values, chunksize=1)
    return [act(value) for value in values]
