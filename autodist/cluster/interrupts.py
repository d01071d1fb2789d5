"""Ctrl-C and SIGTERM while the process is inside TensorFlow.

Python runs its signal handlers only between bytecodes, and a step that waits for another worker may never come back
to them. `Interrupts` notices the signal in a thread, whose callback gets the main thread out (it closes the session);
Python's own handling follows then, as usual.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Self

_WATCHED = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Calls back from a thread when SIGINT or SIGTERM arrives, from `__enter__` to `__exit__`.

    Handlers stay as they are, with one exception: where SIGTERM would end the process without a word, it raises
    `SystemExit` instead, so that the script's `finally` clauses and exit handlers run. Outside the main thread, which
    alone gets signals, nothing is done.

    Args:
        on_interrupt: called with the signal's number, once for each signal.
    """

    def __init__(self, on_interrupt: Callable[[int], None]) -> None:
        self._on_interrupt = on_interrupt
        self._previous_fd = -1
        self._reading: socket.socket | None = None
        self._writing: socket.socket | None = None
        self._took_sigterm = False

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            return self
        self._reading, self._writing = socket.socketpair()
        self._writing.setblocking(False)  # the interpreter asks for it
        self._previous_fd = signal.set_wakeup_fd(self._writing.fileno(), warn_on_full_buffer=False)
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, _raise_exit)
            self._took_sigterm = True
        threading.Thread(target=self._watch, args=(self._reading,), name="autodist-interrupts", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Puts back what was there before; again: nothing happens."""
        if self._writing is None:
            return
        current = signal.set_wakeup_fd(self._previous_fd)
        if current != self._writing.fileno():
            signal.set_wakeup_fd(current)  # somebody took it over after us
        if self._took_sigterm and signal.getsignal(signal.SIGTERM) is _raise_exit:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._writing.close()
        self._writing = None

    def _watch(self, reading: socket.socket) -> None:
        with reading:
            while numbers := reading.recv(64):
                self._pass_on(numbers)
                for number in numbers:
                    if number in _WATCHED:
                        self._on_interrupt(number)

    def _pass_on(self, numbers: bytes) -> None:
        """To whoever had the wakeup descriptor before, as event loops do."""
        if self._previous_fd == -1:
            return
        with contextlib.suppress(OSError):  # it has been closed, or is full and has been woken anyway
            os.write(self._previous_fd, numbers)


def _raise_exit(number: int, frame: FrameType | None) -> None:
    """What a shell reports for a process that a signal ended: 128 and the number."""
    raise SystemExit(128 + number)
