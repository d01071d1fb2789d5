"""Interruptible executor: runs calls that may wait for other workers, in a thread that can be abandoned."""

from __future__ import annotations

import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any, TypeVar

from autodist.errors import ClusterError
from autodist.waits import Event, result_of, start_thread

R = TypeVar("R")

_Request = tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]


class InterruptibleExecutor:
    """Calls functions one at a time in a thread, while the callers wait.

    A step that waits for a lost worker may never return from TensorFlow, even if its session is closed. The
    calling threads wait here instead, where signals (Ctrl-C) and `fail` reach them. A process forked from this one has
    no such thread; its calls raise an error.
    """

    def __init__(self) -> None:
        self._requests: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards all fields below
        self._failure: BaseException | None = None
        self._waiting: set[Future[Any]] = set()
        self._under_way = 0
        self._changed_at = time.monotonic()
        _executors.add(self)
        self._thread = start_thread("caller", self._serve)

    def call(self, function: Callable[..., R], *args: Any) -> R:
        """Returns `function(*args)`; callable from any thread.

        Raises:
            Exception: raised by the function, or passed to `fail`.
        """
        future: Future[R] = Future()
        with self._lock:
            if self._failure is not None:
                raise self._failure
            self._waiting.add(future)
            self._under_way += 1
            self._changed_at = time.monotonic()
        self._requests.put((future, function, args))
        try:
            return result_of(future)
        finally:
            with self._lock:
                self._waiting.discard(future)
                self._changed_at = time.monotonic()

    @property
    def state(self) -> tuple[bool, float]:
        """True if a thread waits in `call`, and the time (by `time.monotonic`) of the last change of that."""
        with self._lock:
            return bool(self._waiting), self._changed_at

    def fail(self, error: BaseException) -> None:
        """Raises `error` in all threads that wait in `call`, and in every later call."""
        with self._lock:
            self._failure = error
            for future in self._waiting:
                with suppress(InvalidStateError):  # it has its result already
                    future.set_exception(error)

    @property
    def is_idle(self) -> bool:
        """True if no call is in progress."""
        with self._lock:
            return not self._under_way

    def wait_until_idle(self, limit: float) -> None:
        """Returns when all calls in progress have finished, or after `limit` seconds."""
        is_done = Event()
        with self._lock:
            self._under_way += 1
        self._requests.put((Future(), is_done.set, ()))
        is_done.wait(limit)

    def close(self, limit: float) -> None:
        """Ends the thread after the call in progress, for which it waits up to `limit` seconds; no call may follow."""
        self._requests.put(None)
        self._thread.join(limit)

    def _refuse(self) -> None:
        self._lock, self._waiting = threading.Lock(), set()  # a thread of the parent may have held the lock
        self._failure = ClusterError(
            f"Process {os.getpid()} was forked from a worker's, as those of `multiprocessing` are, and takes part in "
            "nothing that workers do together: steps, and reading trained variables. Do that in the worker's own "
            "process, and pass the results to other processes."
        )

    def _serve(self) -> None:
        while (request := self._requests.get()) is not None:
            future, function, args = request
            outcome, error = (None, None) if future.done() else _outcome_of(function, args)
            with self._lock:
                self._under_way -= 1
            with suppress(InvalidStateError):  # `fail` came first
                if error is not None:
                    future.set_exception(error)
                else:
                    future.set_result(outcome)


def _outcome_of(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, BaseException | None]:
    try:
        return function(*args), None
    except BaseException as error:  # noqa: BLE001 - raised again in the calling thread
        return None, error


def _leave_to_parent() -> None:
    for executor in list(_executors):
        executor._refuse()


_executors: weakref.WeakSet[InterruptibleExecutor] = weakref.WeakSet()
os.register_at_fork(after_in_child=_leave_to_parent)
