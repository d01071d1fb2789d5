"""How the script is ending, for those who are called at its end (`atexit`), where Python itself does not say."""

from __future__ import annotations

import atexit
import contextlib
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any, NoReturn


class ScriptEnd:
    """Notes whether this process's script ends well.

    An exception that nobody caught is left by Python in `sys.last_value`; `sys.exit` is wrapped to note its argument.
    Only a bare `raise SystemExit(3)` passes unseen: it is known by the process's exit status alone.

    Use `watch_script_end`, which makes one for the process.

    Attributes:
        interrupted_at: when Ctrl-C last interrupted the script (by `time.monotonic`), which may have caught that; None
            if it never did, or if the script has a handler of its own.
    """

    def __init__(self) -> None:
        self.interrupted_at: float | None = None
        self._exit_argument: Any = None
        self._ends_by: signal.Signals | None = None
        self._exit = sys.exit
        sys.exit = self._note_exit
        atexit.register(self._end)  # before the script's own handlers, and so run after them
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._note_interrupt)

    @property
    def is_bad(self) -> bool:
        """Whether the script ends by an exception or by `sys.exit` with a status other than 0."""
        uncaught = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        return uncaught is not None or self._exit_argument not in (None, 0)

    def end_by(self, number: signal.Signals) -> None:
        """Lets the process end by a signal, once its exit handlers have run.

        In these, only a signal can still make the process's exit status tell of a failure.
        """
        self._ends_by = number

    def _end(self) -> None:
        if self._ends_by is not None:
            for stream in (sys.stdout, sys.stderr):
                if stream is not None:
                    with contextlib.suppress(OSError, ValueError):  # nobody reads it, its disk is full, it is closed
                        stream.flush()
            signal.signal(self._ends_by, signal.SIG_DFL)
            signal.raise_signal(self._ends_by)

    def _note_interrupt(self, number: int, frame: FrameType | None) -> None:
        self.interrupted_at = time.monotonic()
        signal.default_int_handler(number, frame)

    def _note_exit(self, status: Any = None, /) -> NoReturn:
        self._exit_argument = status
        self._exit(status)


_the_one: list[ScriptEnd] = []


def watch_script_end() -> ScriptEnd:
    """The process's `ScriptEnd`; from the first call on it notes how the script ends."""
    if not _the_one:
        _the_one.append(ScriptEnd())
    return _the_one[0]
