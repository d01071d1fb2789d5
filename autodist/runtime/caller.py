"""Caller: runs what may wait for other workers, in a thread that can be left behind."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any


class Caller:
    """Calls functions one after the other in a thread of its own, while the caller waits.

    A step that waits for a worker which is gone may never return from TensorFlow, not even when its session is closed.
    The thread that asked for it waits here instead, where signals (Ctrl-C) and `fail` reach it.
    """

    def __init__(self) -> None:
        self._requests: queue.SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._waiting: Future[Any] | None = None
        self._lock = threading.Lock()
        self._changed_at = time.monotonic()
        threading.Thread(target=self._serve, name="autodist-caller", daemon=True).start()

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Returns `function(*args)`.

        Raises:
            Exception: what the function raises, or what `fail` was given.
        """
        future: Future[Any] = Future()
        with self._lock:
            if self._failure is not None:
                raise self._failure
            self._waiting, self._changed_at = future, time.monotonic()
        self._requests.put((future, function, args))
        try:
            return future.result()
        finally:
            self._changed_at = time.monotonic()

    @property
    def state(self) -> tuple[bool, float]:
        """Whether somebody waits in `call`, and since when (by `time.monotonic`) that or the contrary is so."""
        return self._waiting is not None and not self._waiting.done(), self._changed_at

    def fail(self, error: BaseException) -> None:
        """Raises `error` in the thread that waits in `call`, and in every later call."""
        with self._lock:
            self._failure = error
            waiting = self._waiting
        if waiting is not None:
            with suppress(InvalidStateError):  # it has its result already
                waiting.set_exception(error)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way."""
        return self._waiting is None or (self._waiting.done() and self._finished)

    _finished = True

    def _serve(self) -> None:
        while True:
            future, function, args = self._requests.get()
            self._finished = False
            try:
                outcome = function(*args)
            except BaseException as error:  # noqa: BLE001 - all of it belongs to the thread that asked
                self._finished = True
                with suppress(InvalidStateError):  # `fail` was first
                    future.set_exception(error)
            else:
                self._finished = True
                with suppress(InvalidStateError):
                    future.set_result(outcome)
