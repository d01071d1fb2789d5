"""Runs work in threads that waits for the disk, or that computes without holding Python's lock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from multiprocessing.pool import ThreadPool
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def in_threads(act: Callable[[T], R], values: Sequence[T], most: int) -> list[R]:
    """Calls `act` on each value, with at most `most` calls at the same time; works also after the script has ended."""
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
