"""Iterators of `tf.data` that nobody reads any more, destroyed in the background."""

from __future__ import annotations

import atexit
import sys
import threading
import time
import weakref
from typing import Any

from autodist.process_exit import exit_without_destructors
from autodist.waits import join_all

_OTHER_OWNERS_LIMIT = 1.0  # seconds
_END_LIMIT = 1.0  # seconds for which the end of the process waits for destructors in progress
_ONLY_OURS = 2  # references: that of the list, and that of the argument of `getrefcount`


def destroy_aside(reader: Any, resource: list[Any]) -> None:
    """Has an iterator's resource destroyed by a thread of its own, once its reader is gone or the script has ended.

    TensorFlow's destructor stops the thread that tunes the pipeline, and waits for it. The stop is lost if that thread
    tests for it between its notification and the moment at which it counts (`CancellationManager::StartCancel` runs the
    callbacks first), and then it sleeps on, for about as long as the iterator has existed, up to a minute. Of iterators
    3 to 25 s old, one in four to eight took that long, on an idle machine as well; with several workers, almost every
    epoch has one that all wait for.

    The end of the process waits a moment for destructors in progress. If one takes longer, the process exits without
    the destructors of TensorFlow's libraries (see `exit_without_destructors`), which aborted about one run in several
    thousand.

    Args:
        reader: an object whose end is that of the iterator.
        resource: list with the iterator's handle, which the reader uses; it is cleared.
    """
    weakref.finalize(reader, _destroy, resource)


def _destroy(resource: list[Any]) -> None:
    thread = threading.Thread(target=_clear, args=(resource,), name="autodist-iterator", daemon=True)
    _threads.add(thread)
    try:
        thread.start()
    except RuntimeError:  # Python 3.12 starts no thread once the script has ended
        _threads.discard(thread)
        resource.clear()
        return
    if _has_script_ended():
        _wait_for_destructors()


def _clear(resource: list[Any]) -> None:
    """Drops the handle, at best as its last owner: the iterator itself has one too, and often ends a moment later."""
    deadline = time.monotonic() + _OTHER_OWNERS_LIMIT
    while sys.getrefcount(resource[0]) > _ONLY_OURS and time.monotonic() < deadline and not _has_script_ended():
        time.sleep(0.001)
    resource.clear()
    _threads.discard(threading.current_thread())


def _has_script_ended() -> bool:
    return not threading.main_thread().is_alive()


def _wait_for_destructors() -> None:
    """Waits up to `_END_LIMIT` for all threads together; an exit handler, and called by finalizers that run as such."""
    _end.append(time.monotonic() + _END_LIMIT)
    threads = [one for one in _threads.copy() if one.is_alive() and one is not threading.current_thread()]
    join_all(threads, _end[0] - time.monotonic())
    if any(thread.is_alive() for thread in threads):
        exit_without_destructors()


_threads: set[threading.Thread] = set()
_end: list[float] = []  # the first is the moment, by `time.monotonic`, at which the process goes on to end
atexit.register(_wait_for_destructors)
