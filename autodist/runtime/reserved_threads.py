"""Threads that end a run as Python ends, when Python 3.12 starts no new ones."""

from __future__ import annotations

import queue
import sys
import threading
import weakref
from collections.abc import Callable

from autodist.waits import start_thread

# Python 3.12 refuses to start a thread once the script has ended, in exit handlers as well.
_STARTS_NONE_AT_EXIT = sys.version_info[:2] == (3, 12)


class ReservedThreads:
    """Daemon threads for functions that may be called by an exit handler.

    Under Python 3.12, `reserve` starts threads that wait for their function. Under other versions, `start` starts each.
    The threads that wait end with this object.
    """

    def __init__(self, needs_reserve: bool = _STARTS_NONE_AT_EXIT) -> None:
        self._needs_reserve = needs_reserve
        self._waiting: queue.SimpleQueue[tuple[threading.Thread, queue.SimpleQueue[Callable[[], object]]]]
        self._waiting = queue.SimpleQueue()

    def reserve(self) -> None:
        """Prepares for one further call of `start`."""
        if self._needs_reserve:
            work: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
            thread = start_thread("reserved", _run_one, work)
            weakref.finalize(self, work.put, _nothing).atexit = False
            self._waiting.put((thread, work))

    def start(self, function: Callable[[], object]) -> threading.Thread:
        """Calls a function in a thread, which is returned.

        Raises:
            RuntimeError: Python 3.12 is ending, and no thread is reserved.
        """
        try:
            thread, work = self._waiting.get_nowait()
        except queue.Empty:
            thread = start_thread("ending", function)
        else:
            work.put(function)
        return thread


def _run_one(work: queue.SimpleQueue[Callable[[], object]]) -> None:
    work.get()()


def _nothing() -> None:
    pass
