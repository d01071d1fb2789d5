"""Filter of standard error that removes lines that TensorFlow's C++ code writes in every run."""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from autodist.logs import tensorflow_log
from autodist.logs.terminal import LEVEL_VARIABLE

log = logging.getLogger("autodist")

_STDERR = 2
END_LIMIT = 2.0
"""Seconds that the filter has to finish its output; it runs on as long as a forked process still writes."""

_BRIEF_END_LIMIT = 0.5
"""Seconds that the thread has to finish its output."""

_filter_lock = threading.Lock()

_plain_stderr = [_STDERR]
"""The last one is a descriptor of this process's standard error, without the filter of a context."""


@contextmanager
def quiet_tensorflow(when: bool = True) -> Iterator[None]:
    """Removes lines that TensorFlow logs in every run from this process's standard error, within the context.

    Lines are matched by their exact forms (`tensorflow_log.says_nothing`); `AUTODIST_LOG_LEVEL=DEBUG` shows all. The
    filter is a separate process, so that TensorFlow's last lines before it aborts this process are shown.

    Args:
        when: True to filter.
    """
    if not when or is_debugging() or not _filter_lock.acquire(blocking=False):
        yield
        return
    try:
        with _filtered():
            yield
    finally:
        _filter_lock.release()


@contextmanager
def quiet_briefly() -> Iterator[None]:
    """Like `quiet_tensorflow`, for a call that takes milliseconds: a thread filters, which starts at once.

    If TensorFlow aborts this process during the call, its last lines may be lost.
    """
    if is_debugging() or not _filter_lock.acquire(blocking=False):
        yield
        return
    try:
        plain = _copy_of_stderr()
        if plain is None:
            yield
            return
        source, sink = os.pipe()
        thread = threading.Thread(target=_pass_on, args=(source, plain), name="autodist-quiet", daemon=True)
        thread.start()
        os.dup2(sink, _STDERR)
        os.close(sink)
        try:
            yield
        finally:
            _flush_python()
            os.dup2(plain, _STDERR)  # closes the pipe, unless a process that was started meanwhile writes to it
            thread.join(_BRIEF_END_LIMIT)
    finally:
        _filter_lock.release()


def _pass_on(source: int, target: int) -> None:
    tensorflow_log.pass_on(source, target)
    os.close(source)
    os.close(target)


def is_debugging() -> bool:
    """Returns True if all lines are shown; also works before the log is set up."""
    return log.isEnabledFor(logging.DEBUG) or os.environ.get(LEVEL_VARIABLE, "").upper() == "DEBUG"


@contextmanager
def _filtered() -> Iterator[None]:
    opened = open_filter()
    if opened is None:
        yield
        return
    child, plain = opened
    end = functools.partial(_end, plain, child, os.getpid())
    # Ctrl-C may interrupt any line below, and its traceback also goes through the filter, which must have written all
    # of it when this process exits.
    atexit.register(end)
    try:
        assert child.stdin is not None, "requested above"
        os.dup2(child.stdin.fileno(), _STDERR)
        child.stdin.close()
        _plain_stderr.append(plain)
        yield
    finally:
        _plain_stderr[1:] = []
        end()
        atexit.unregister(end)
        os.close(plain)
        await_later(child)


def open_filter() -> tuple[subprocess.Popen[bytes], int] | None:
    """Returns a process that filters its standard input, and the descriptor of standard error to which it writes.

    Returns None if standard error is closed, or if the process cannot be started.
    """
    plain = _copy_of_stderr()
    if plain is None:
        return None
    child = _start_filter(plain)
    if child is None:
        os.close(plain)
        return None
    return child, plain


def await_later(child: subprocess.Popen[bytes]) -> None:
    """Awaits a filter in the background if it has not ended, since a process that was forked meanwhile writes to it."""
    if child.returncode is None:
        threading.Thread(target=child.wait, name="autodist-quiet", daemon=True).start()


def _copy_of_stderr() -> int | None:
    """Returns a copy of the descriptor of unfiltered standard error; None if it is closed.

    If it was closed when Python started, another file may have its number.
    """
    try:
        return None if sys.__stderr__ is None else os.dup(_plain_stderr[-1])
    except OSError:  # it is closed
        return None


def _start_filter(target: int) -> subprocess.Popen[bytes] | None:
    """Returns the process that filters its standard input, and writes to a descriptor; None if it cannot be started."""
    command = [sys.executable, "-I", "-S", tensorflow_log.__file__]
    # Ctrl-C goes to all processes of the terminal and may reach this one before it has a session of its own. It starts
    # with SIGINT, SIGTERM and SIGHUP blocked and exits at the end of its input.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=target, start_new_session=True
        )
    except OSError as error:
        log.debug("TensorFlow's startup messages are shown, because %s cannot be started (%s)", sys.executable, error)
        return None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end(plain: int, child: subprocess.Popen[bytes], process: int) -> None:
    """Restores standard error of a process and waits until the filter has written everything; may be called twice."""
    if os.getpid() != process:
        return  # a process forked meanwhile: it exits with its input
    _flush_python()
    os.dup2(plain, _STDERR)
    if child.stdin is not None:
        child.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(END_LIMIT)


def _flush_python() -> None:
    """Flushes Python's buffered standard error in the same direction as earlier output."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):  # no reader, disk full, or closed
            sys.stderr.flush()
