"""The exit of this process after Python's finalization: by a signal, with another status, or without C++ destructors.

Python has chosen the exit status before it runs exit handlers (`atexit`), so these functions add handlers of the C
library, which run after Python's finalization, the last one first.
"""

from __future__ import annotations

import ctypes
import signal

_chosen: list[str] = []
"""The C functions that end the process; the last is called first."""


def exit_by_signal(number: signal.Signals) -> None:
    """Makes the process raise a signal as it exits; it must have its default handler by then."""
    _call_at_exit("raise", number)


def exit_with_status(status: int) -> None:
    """Makes the process exit with a status, unless `exit_by_signal` is called later."""
    _call_at_exit("_exit", status)


def exit_without_destructors() -> None:
    """Makes the process exit with its own status, but without the destructors of C++ libraries.

    Python ends a thread that returns to it after its finalization, by unwinding the thread's stack. If TensorFlow's
    libraries have destroyed their static data by then, C++ aborts the process.
    """
    if _chosen:
        return  # the process ends by another function, which comes before the destructors as well
    _chosen.append("_exit")
    c = ctypes.CDLL(None)
    c.on_exit(ctypes.cast(c._exit, ctypes.c_void_p), None)  # calls `_exit` with the status
    c.__cxa_atexit(ctypes.cast(c.fflush, ctypes.c_void_p), None, None)


def _call_at_exit(function: str, number: int) -> None:
    _chosen.append(function)
    c = ctypes.CDLL(None)
    c.__cxa_atexit(ctypes.cast(getattr(c, function), ctypes.c_void_p), ctypes.c_void_p(number), None)
