"""Waits in which a signal is never lost.

Python runs the handler of a signal in the main thread, between two instructions. A signal that comes after the last
instruction and before the system call that waits neither runs its handler nor ends the wait, which may last for ever:
on a busy machine, about 3 Ctrl-C in 1000 that come at such a moment. The waits of this module look up once a second.
Use them wherever the main thread of a script may wait for other threads, processes or workers for longer than a second.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")

_LONGEST = 1.0
"""Seconds after which a wait looks up."""


class Condition(threading.Condition):  # noqa: TID251
    """As `threading.Condition`; `wait` may return early, as its callers have to expect of any condition."""

    def wait(self, timeout: float | None = None) -> bool:
        if timeout is not None and timeout <= _LONGEST:
            return super().wait(timeout)
        super().wait(_LONGEST)
        return True


class Event(threading.Event):  # noqa: TID251
    """As `threading.Event`."""

    def wait(self, timeout: float | None = None) -> bool:
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while not super().wait(min(_LONGEST, max(0.0, deadline - time.monotonic()))):
            if time.monotonic() >= deadline:
                return False
        return True


def start_thread(name: str, work: Callable[..., object], *arguments: object) -> threading.Thread:
    """Starts a daemon thread `autodist-NAME` that calls `work`; it ends with the process."""
    thread = threading.Thread(target=work, args=arguments, name=f"autodist-{name}", daemon=True)
    thread.start()
    return thread


def join(thread: threading.Thread) -> None:
    """Returns when a thread has ended."""
    while thread.is_alive():
        thread.join(_LONGEST)


def join_all(threads: Iterable[threading.Thread], limit: float) -> None:
    """Returns when all threads have ended, or after about `limit` seconds."""
    deadline = time.monotonic() + limit
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


def take(items: queue.SimpleQueue[T]) -> T:
    """Returns the next item of a queue, as soon as there is one."""
    while True:
        with suppress(queue.Empty):
            return items.get(timeout=_LONGEST)


def result_of(future: Future[T]) -> T:
    """Returns the result of a future, as soon as there is one.

    Raises:
        BaseException: the error that the future has instead.
    """
    while not future.done():
        with suppress(FutureTimeoutError):
            future.exception(_LONGEST)
    return future.result()
