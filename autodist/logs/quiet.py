"""Standard error without what TensorFlow's C++ code writes to it in every run."""

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
_END_LIMIT = 2.0
"""Seconds for the filter to pass on what was written; it lives on while a process that was forked meanwhile writes."""

_open = threading.Lock()


@contextmanager
def quiet_tensorflow(when: bool = True) -> Iterator[None]:
    """Leaves out of this process's standard error what TensorFlow says in every run, while the context is open.

    Lines are known by their exact forms (`tensorflow_log.says_nothing`), and `AUTODIST_LOG_LEVEL=DEBUG` shows all. They
    go through a process of its own, so that what TensorFlow says right before it aborts this one is seen.

    Args:
        when: whether anything is to be left out.
    """
    if not when or _is_debugging() or not _open.acquire(blocking=False):
        yield
        return
    try:
        with _filtered():
            yield
    finally:
        _open.release()


def _is_debugging() -> bool:
    """Also before the log is set up."""
    return log.isEnabledFor(logging.DEBUG) or os.environ.get(LEVEL_VARIABLE, "").upper() == "DEBUG"


@contextmanager
def _filtered() -> Iterator[None]:
    # Where standard error was closed when Python began, another file may have got its number since.
    plain = None if sys.__stderr__ is None else _copy_of_stderr()
    if plain is None:
        yield
        return
    child = _start_filter()
    if child is None:
        os.close(plain)
        yield
        return
    end = functools.partial(_end, plain, child, os.getpid())
    # Ctrl-C may come between any two lines of this, and its traceback then goes through the filter, too. All of it is
    # to be told by the time this process ends.
    atexit.register(end)
    try:
        assert child.stdin is not None, "it was asked for"
        os.dup2(child.stdin.fileno(), _STDERR)
        child.stdin.close()
        yield
    finally:
        end()
        atexit.unregister(end)
        os.close(plain)
        if child.returncode is None:
            threading.Thread(target=child.wait, name="autodist-quiet", daemon=True).start()


def _copy_of_stderr() -> int | None:
    try:
        return os.dup(_STDERR)
    except OSError:  # it is closed
        return None


def _start_filter() -> subprocess.Popen[bytes] | None:
    command = [sys.executable, "-I", "-S", tensorflow_log.__file__]
    # Ctrl-C goes to all processes of the terminal, and this one may come to it before it has a session of its own. It
    # ends with what it reads, and is born deaf to what ends others.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)
    except OSError as error:
        log.debug("what TensorFlow says at its start is shown: %s cannot be started (%s)", sys.executable, error)
        return None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end(plain: int, child: subprocess.Popen[bytes], process: int) -> None:
    """Gives a process its standard error back, and returns when the filter has passed on all; may be called again."""
    if os.getpid() != process:
        return  # forked from it meanwhile: it ends by itself
    _flush_python()
    os.dup2(plain, _STDERR)
    if child.stdin is not None:
        child.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(_END_LIMIT)


def _flush_python() -> None:
    """What Python has written by now goes the same way as what was written before it."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):  # nobody reads it, its disk is full, it is closed
            sys.stderr.flush()
