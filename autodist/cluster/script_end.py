"""Detects in exit handlers (`atexit`) whether the script succeeded, which Python does not report there."""

from __future__ import annotations

import _thread
import contextlib
import functools
import os
import signal
import sys
import threading
import time
from _sitebuiltins import Quitter
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, ClassVar, NoReturn

from autodist.process_exit import exit_by_signal, exit_with_status

# Attribute of an exception raised by a signal: the signal, which is sent again if the exception is lost. Python ignores
# it in a finalizer, and TensorFlow and Keras may drop it. In exit handlers, `end_by` handles the signal.
_SIGNAL_ATTRIBUTE = "_autodist_comes_again"


class ScriptEnd:
    """Records whether this process's script succeeds.

    Python leaves an uncaught exception in `sys.last_value`. `sys.exit`, `exit` and `quit` are wrapped to record their
    argument if they may end the script, unless the script catches the exception. A bare `raise SystemExit(3)` is not
    detected: only the exit status of the process shows it.

    Use `watch_script_end`, which creates the only instance of the process.

    Attributes:
        uncaught: exceptions that ended threads other than the main one; Python prints them and continues.
        interrupted_at: time of the last Ctrl-C (by `time.monotonic`), which the script may have caught; None if there
            was none, or if the script has a handler of its own. After the script, Ctrl-C ends the process.
        is_terminated: True if SIGTERM, or a call of `end_script_by`, has ended the script.
        delays_termination: called on a SIGTERM that would end the script; if it returns True, the script continues.
    """

    # An attribute of the class: Python sets the globals of modules to None before the last finalizers run, whose
    # exceptions `_note_ignored` handles, too.
    _comes_again: ClassVar[str] = _SIGNAL_ATTRIBUTE

    def __init__(self) -> None:
        self.uncaught: list[BaseException] = []
        self.interrupted_at: float | None = None
        self.is_terminated = False
        self.delays_termination: Callable[[], bool] = lambda: False
        self._exit_argument: Any = None
        self._exits = 0
        self._ends_by: signal.Signals | None = None
        self._exit = sys.exit
        sys.exit = self._note_exit
        self._quit = Quitter.__call__
        setattr(Quitter, "__call__", lambda quitter, code=None: self._note(self._quit, quitter, code))  # noqa: B010
        self._thread_hook = threading.excepthook
        threading.excepthook = self._note_thread
        self._ignored_hook = sys.unraisablehook
        sys.unraisablehook = self._note_ignored
        if _is_main_thread() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._note_interrupt)

    @property
    def is_bad(self) -> bool:
        """True if the script ends by an exception, by SIGTERM or by `sys.exit` with a status other than 0."""
        return self.raised is not None or self.is_terminated or self._exit_argument not in (None, 0)

    @property
    def raised(self) -> BaseException | None:
        """The uncaught exception that ends the script; None if there is none."""
        return getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)

    @property
    def is_held(self) -> bool:
        """True if an exception has ended the script, and a thread or an exit handler keeps the process from ending."""
        main = threading.main_thread().ident
        return self.raised is not None and _is_after_the_script(
            None if main is None else sys._current_frames().get(main)
        )

    def was_signalled_since(self, moment: float) -> bool:
        """Returns True if a signal that ends the process has been received.

        Args:
            moment: a time of `time.monotonic`; an earlier Ctrl-C, which the script has caught, does not count.
        """
        return self.is_terminated or (self.interrupted_at is not None and self.interrupted_at >= moment)

    def end_by(self, number: signal.Signals) -> None:
        """Ends the process by a signal after all exit handlers have run; only the first call counts.

        The signal is raised in a C exit handler: exit handlers registered before the import of this module have run by
        then, and outputs are flushed.
        """
        if self._ends_by is not None:
            return
        self._ends_by = number
        if not callable(signal.getsignal(number)):  # it may be ignored; Python restores the default of its own handlers
            signal.signal(number, signal.SIG_DFL)
        exit_by_signal(number)

    def fail(self) -> None:
        """Makes the exit status of the process show a failure, after all exit handlers have run.

        Python has set the status before it runs exit handlers, so a C exit handler sets another one. The status is 1,
        unless the script has chosen one; a signal (`end_by`) comes before both.
        """
        if self._ends_by is None:
            chosen = self._exit_argument
            exit_with_status(chosen if isinstance(chosen, int) and chosen else 1)

    def end_script_by(self, number: signal.Signals) -> NoReturn:
        """Ends the script by an exception and the process by a signal: `finally` blocks and exit handlers run.

        Raises:
            SystemExit: always; the process ends by the signal even if the script catches it.
        """
        self.is_terminated = True
        self.end_by(number)
        sys.exit(128 + number)

    def run_handlers_on_termination(self) -> None:
        """Makes SIGTERM end the script by an exception, where by default it ends the process at once.

        `finally` blocks and exit handlers run; then the signal ends the process. A script with a handler of its own
        keeps it. Processes that the script forks end at once.
        """
        if _is_main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._note_termination)
            os.register_at_fork(after_in_child=self._forget_termination)

    def _note_termination(self, number: int, frame: FrameType | None) -> None:
        if self.delays_termination():
            return
        with _marking_exceptions(signal.SIGTERM, frame):
            self.end_script_by(signal.SIGTERM)

    def _forget_termination(self) -> None:
        if signal.getsignal(signal.SIGTERM) == self._note_termination:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _note_interrupt(self, number: int, frame: FrameType | None) -> None:
        self.interrupted_at = time.monotonic()
        if _is_after_the_script(frame):  # an exit handler may be running, whose exceptions Python ignores
            self.end_by(signal.SIGINT)
        elif self._is_reported(frame):
            self.end_by(signal.SIGINT)
            return
        with _marking_exceptions(signal.SIGINT, frame):
            signal.default_int_handler(number, frame)

    def _is_reported(self, frame: FrameType | None) -> bool:
        """Returns True if Python prints the exception that has ended the script, or a hook of the script does.

        Another exception would come between its lines, as an error in `sys.excepthook`.
        """
        outermost = _outermost(frame)
        return self.raised is not None and outermost is not None and outermost.f_code.co_name not in _OF_SCRIPTS

    def _note_thread(self, about: threading.ExceptHookArgs, /) -> None:
        if about.exc_value is not None:
            self.uncaught.append(about.exc_value)
        self._thread_hook(about)

    def _note_ignored(self, about: sys.UnraisableHookArgs, /) -> None:
        lost = getattr(about.exc_value, self._comes_again, None)
        if lost is not None:
            lost.send()
        elif not (self.is_terminated and isinstance(about.exc_value, SystemExit)):  # a further SIGTERM, at the end
            self._ignored_hook(about)

    def _note_exit(self, status: Any = None, /) -> NoReturn:
        self._note(self._exit, status)

    def _note(self, leave: Callable[..., NoReturn], *arguments: Any) -> NoReturn:
        """Calls a function that raises SystemExit, and records the last argument, the status."""
        # `sys.exit` in another thread ends only the thread, and Python ignores it in an exit handler.
        may_end_the_script = _is_main_thread() and not _is_after_the_script(sys._getframe())
        try:
            leave(*arguments)
        except SystemExit as error:
            if may_end_the_script:
                self._exits += 1
                self._exit_argument = arguments[-1]
                error.__dict__["_goes"] = _DeletionWatcher(functools.partial(self._forget_exit, self._exits))
            raise

    def _forget_exit(self, number: int, _: FrameType) -> None:
        """Forgets an exit's argument: its exception was deleted while the script runs, so the script has caught it."""
        if number == self._exits:
            self._exit_argument = None


class _DeletionWatcher:
    """An attribute of an exception, deleted with it: detects that something has caught the exception.

    An uncaught exception is deleted after Python has left all code of the script.

    Args:
        caught: called, while the script runs, with the frame that deletes the exception.
    """

    def __init__(self, caught: Callable[[FrameType], None]) -> None:
        self._caught = caught

    def __del__(self, getframe: Callable[[], FrameType] = sys._getframe) -> None:
        frame = getframe().f_back  # None if the globals of modules are None: no Python code calls any more
        if frame is not None and _is_main_thread() and not _is_after_the_script(frame):
            self._caught(frame)

    def __reduce__(self) -> tuple[Any, ...]:
        return object, ()  # a process that receives the exception ends on its own


class _SignalAgain:
    """A signal that is sent again, once, if the exception that it has raised is lost.

    C++ code of TensorFlow and Keras calls Python, for example to test for an attribute. It clears any exception that
    comes from there, or replaces it by another one, so a Ctrl-C during the trace of a step could be lost. A script may
    catch the exception.

    Args:
        number: the signal.
        frame: the frame that it interrupted.
    """

    def __init__(self, number: signal.Signals, frame: FrameType | None) -> None:
        self._number, self._frame = number, frame
        self._is_sent = False

    def send(self) -> None:
        if not self._is_sent:
            self._is_sent = True
            # Without `threading`, since the interrupted code may hold one of its locks.
            _thread.start_new_thread(_resend, (self._number,))

    def caught_in(self, catching: FrameType) -> None:
        """Sends the signal if code of a library, within which it came, has dropped the exception."""
        frame = self._frame
        while frame is not None and frame is not catching:
            frame = frame.f_back
        if frame is not None and _is_of_library(catching):
            self.send()

    def __reduce__(self) -> tuple[Any, ...]:
        return _SignalAgain, (self._number, None)


def _is_of_library(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] in _LIBRARIES


_LIBRARIES = frozenset({"keras", "tensorflow", "tf_keras"})
_RESEND_DELAY = 0.05


@contextlib.contextmanager
def _marking_exceptions(number: signal.Signals, frame: FrameType | None) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        if not _is_after_the_script(frame):
            again = _SignalAgain(number, frame)
            error.__dict__[_SIGNAL_ATTRIBUTE] = again
            error.__dict__["_goes"] = _DeletionWatcher(again.caught_in)
        raise


def _resend(number: signal.Signals) -> None:
    time.sleep(_RESEND_DELAY)  # the signal has to arrive after the finalizer
    os.kill(os.getpid(), number)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _is_after_the_script(frame: FrameType | None) -> bool:
    """Returns True if the main thread, which is in `frame`, has left the script, and Python is ending the process."""
    outermost = _outermost(frame)
    # At its end, Python first calls a function of `threading` that ends the main thread.
    is_ending = outermost is not None and outermost.f_code.co_filename == threading.__file__
    return is_ending or not threading.main_thread().is_alive()


def _outermost(frame: FrameType | None) -> FrameType | None:
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
    return frame


_OF_SCRIPTS = frozenset({"<module>", "_run_module_as_main"})
"""Names of the outermost function of a script, by which it is started: `python script.py`, `python -m module`."""


_the_one: list[ScriptEnd] = []


def watch_script_end() -> ScriptEnd:
    """Returns the process's `ScriptEnd`, which the first call creates."""
    if not _the_one:
        _the_one.append(ScriptEnd())
    return _the_one[0]
