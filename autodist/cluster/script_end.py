"""How the script is ending, for those who are called at its end (`atexit`), where Python itself does not say."""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, ClassVar, NoReturn

# Of an exception that a signal raises: the signal, which is sent again where Python ignores the exception, as it does
# in a finalizer. In exit handlers the signal is heeded otherwise.
_COMES_AGAIN = "_autodist_comes_again"


class ScriptEnd:
    """Notes whether this process's script ends well.

    An exception that nobody caught is left by Python in `sys.last_value`; `sys.exit` is wrapped to note its argument,
    where it may end the script, and as long as nobody catches what it raises. Only a bare `raise SystemExit(3)` passes
    unseen: it is known by the process's exit status alone.

    Use `watch_script_end`, which makes one for the process.

    Attributes:
        uncaught: what ended threads other than the main one; Python prints it and goes on.
        interrupted_at: when Ctrl-C last interrupted the script (by `time.monotonic`), which may have caught that; None
            if it never did, or if the script has a handler of its own. After the script it ends the process, too.
        is_terminated: whether SIGTERM, or what it stands for, has ended the script.
        heeds_termination: asked when SIGTERM has come that would end the script; True: it does not.
    """

    # An attribute of the class, since Python sets the globals of modules to None before the last finalizers run, and
    # what these raise comes to `_note_ignored`, too.
    _comes_again: ClassVar[str] = _COMES_AGAIN

    def __init__(self) -> None:
        self.uncaught: list[BaseException] = []
        self.interrupted_at: float | None = None
        self.is_terminated = False
        self.heeds_termination: Callable[[], bool] = lambda: False
        self._exit_argument: Any = None
        self._exits = 0
        self._ends_by: signal.Signals | None = None
        self._exit = sys.exit
        sys.exit = self._note_exit
        self._thread_hook = threading.excepthook
        threading.excepthook = self._note_thread
        self._ignored_hook = sys.unraisablehook
        sys.unraisablehook = self._note_ignored
        if _is_main_thread() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._note_interrupt)

    @property
    def is_bad(self) -> bool:
        """Whether the script ends by an exception or by `sys.exit` with a status other than 0."""
        return self.raised is not None or self.is_terminated or self._exit_argument not in (None, 0)

    @property
    def raised(self) -> BaseException | None:
        """What ends the script, and nobody caught; None: nothing does."""
        return getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)

    def was_told_to_end_since(self, moment: float) -> bool:
        """Whether a signal has come by which the process ends.

        Args:
            moment: a time of `time.monotonic`, since when Ctrl-C counts; what the script has caught before is its own.
        """
        return self.is_terminated or (self.interrupted_at is not None and self.interrupted_at >= moment)

    def end_by(self, number: signal.Signals) -> None:
        """Lets the process end by a signal, once all its exit handlers have run; the first call counts.

        In these, only a signal can still make the process's exit status tell of a failure. It is raised where C ends
        the process: what was registered before this module was imported has run by then, too, and outputs are flushed.
        """
        if self._ends_by is not None:
            return
        self._ends_by = number
        if not callable(signal.getsignal(number)):  # ignored, maybe; what is handled in Python gets its default back
            signal.signal(number, signal.SIG_DFL)
        _raise_at_the_end(number)

    def end_script_by(self, number: signal.Signals) -> NoReturn:
        """Ends the script as an exception would, and by a signal the process: `finally` and exit handlers run.

        Raises:
            SystemExit: always; that nobody catches it is not needed for the script to end badly.
        """
        self.is_terminated = True
        self.end_by(number)
        sys.exit(128 + number)

    def run_handlers_on_termination(self) -> None:
        """Lets SIGTERM, which by default ends a process at once, end the script as an exception would.

        `finally` and exit handlers run, and the signal ends the process after them. A script with a handler of its own
        keeps that; processes that the script forks end at once.
        """
        if _is_main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._note_termination)
            os.register_at_fork(after_in_child=self._forget_termination)

    def _note_termination(self, number: int, frame: FrameType | None) -> None:
        if self.heeds_termination():
            return
        with _coming_again(signal.SIGTERM, frame):
            self.end_script_by(signal.SIGTERM)

    def _forget_termination(self) -> None:
        if signal.getsignal(signal.SIGTERM) == self._note_termination:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _note_interrupt(self, number: int, frame: FrameType | None) -> None:
        self.interrupted_at = time.monotonic()
        if _is_after_the_script(frame):  # where Python may ignore the exception: it may come in any exit handler
            self.end_by(signal.SIGINT)
        with _coming_again(signal.SIGINT, frame):
            signal.default_int_handler(number, frame)

    def _note_thread(self, about: threading.ExceptHookArgs, /) -> None:
        if about.exc_value is not None:
            self.uncaught.append(about.exc_value)
        self._thread_hook(about)

    def _note_ignored(self, about: sys.UnraisableHookArgs, /) -> None:
        number = getattr(about.exc_value, self._comes_again, None)
        if number is None:
            self._ignored_hook(about)
        else:  # no `threading`, of which what was interrupted may hold a lock
            _thread.start_new_thread(_send_again, (number,))

    def _note_exit(self, status: Any = None, /) -> NoReturn:
        # Of another thread it ends that alone, and in an exit handler Python ignores it.
        may_end_the_script = _is_main_thread() and not _is_after_the_script(sys._getframe())
        try:
            self._exit(status)
        except SystemExit as error:
            if may_end_the_script:
                self._exits += 1
                self._exit_argument = status
                error.__dict__["_goes"] = _Goes(self._forget_exit, self._exits)
            raise

    def _forget_exit(self, number: int) -> None:
        """What an exit has raised is gone while the script goes on, so that somebody has caught it."""
        if number == self._exits:
            self._exit_argument = None


class _Goes:
    """What an exception of `sys.exit` carries: it goes with that, and tells where the script goes on then.

    An exception that nobody catches goes when Python has left all code of the script.

    Args:
        caught: called, with the number, where somebody has caught the exception.
        number: of the exit.
    """

    def __init__(self, caught: Callable[[int], None], number: int) -> None:
        self._caught, self._number = caught, number

    def __del__(self, getframe: Callable[[], FrameType] = sys._getframe) -> None:
        frame = getframe().f_back  # None where the globals of modules are None already: Python code calls no more
        if frame is not None and _is_main_thread() and not _is_after_the_script(frame):
            self._caught(self._number)

    def __reduce__(self) -> tuple[Any, ...]:
        return object, ()  # a process to which the exception goes has another end


_SENT_AGAIN_AFTER = 0.05


@contextlib.contextmanager
def _coming_again(number: signal.Signals, frame: FrameType | None) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        if not _is_after_the_script(frame):
            error.__dict__[_COMES_AGAIN] = number
        raise


def _send_again(number: signal.Signals) -> None:
    time.sleep(_SENT_AGAIN_AFTER)  # it has to come after the finalizer
    os.kill(os.getpid(), number)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _is_after_the_script(frame: FrameType | None) -> bool:
    """Whether the main thread, which is in `frame`, has left the script, and Python is ending the process."""
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
    is_first = frame is not None and frame.f_code.co_filename == threading.__file__  # it ends the main thread first
    return is_first or not threading.main_thread().is_alive()


def _raise_at_the_end(number: signal.Signals) -> None:
    """Has the C library raise a signal when the process ends, which is after all that Python does then."""
    c = ctypes.CDLL(None)
    c.__cxa_atexit(ctypes.cast(getattr(c, "raise"), ctypes.c_void_p), ctypes.c_void_p(number), None)


_the_one: list[ScriptEnd] = []


def watch_script_end() -> ScriptEnd:
    """The process's `ScriptEnd`; from the first call on it notes how the script ends."""
    if not _the_one:
        _the_one.append(ScriptEnd())
    return _the_one[0]
