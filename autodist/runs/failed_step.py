"""Guard against a script that continues after a step has failed on its worker only."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType

from autodist.errors import ClusterError, WorkerFailedError
from autodist.logs.formatting import summary_of, words_of


class FailedStepGuard:
    """Ensures that a worker that failed in a step takes part in no later one.

    The other workers wait for the step that it missed. They would match its next messages with that step, and would
    wait forever at the end. A script that survives the error ends the other workers when it makes its next step, and
    after `end_limit` at the latest.

    Args:
        others_wait: returns True if other workers have joined, which would wait for this one.
        step_lock: held during a step, if the script's threads must run steps one at a time.
        is_met_by_all: returns True if all workers have raised the same kind of error here and nothing has run. Its
            second argument is True if the error, of any kind, was raised before the step.
        on_survived: called once, from any thread, with the error of a missed step when the script continues after it.
        end_limit: seconds within which a script that does not survive the error has ended.

    Attributes:
        step_lock: the argument.
        refused: summary of the last error that no other worker waited for, if it came before the first step; None if
            there was none.
    """

    def __init__(
        self,
        others_wait: Callable[[], bool],
        step_lock: AbstractContextManager[object] | None = None,
        is_met_by_all: Callable[[BaseException, bool], bool] = lambda error, is_before: False,
        on_survived: Callable[[BaseException], None] = lambda error: None,
        end_limit: float = 8.0,
    ) -> None:
        self._others_wait, self.step_lock = others_wait, step_lock or nullcontext()
        self._is_met_by_all, self._on_survived, self._end_limit = is_met_by_all, on_survived, end_limit
        self._surviving = threading.Lock()
        self._is_survived = False
        self._timer: threading.Timer | None = None
        self._error: BaseException | None = None
        self._met_by_all: BaseException | None = None
        self._is_over = False
        self._last_step_at: float | None = None
        self.refused: str | None = None

    def __bool__(self) -> bool:
        """True if a step was missed."""
        return self._error is not None

    @property
    def error(self) -> BaseException | None:
        """The error of the missed step; None if none was missed."""
        return self._error

    @property
    def has_stepped(self) -> bool:
        """True if a step was made."""
        return self._last_step_at is not None

    def has_stepped_since(self, moment: float) -> bool:
        """Returns True if a step was made later than `moment`, by `time.monotonic`."""
        return self._last_step_at is not None and self._last_step_at > moment

    def guarding(
        self,
        but: type[Exception] | tuple[type[Exception], ...] = (),
        is_step: bool = True,
        is_before: bool = False,
    ) -> AbstractContextManager[None]:
        """Context of a collective call: marks it as missed if it raises here.

        Args:
            but: exceptions that all workers raise together, after which the script may continue.
            is_step: True for a step, which proves that this worker continues with the others.
            is_before: True for a call that precedes a step; any exception then refuses the step.

        Raises:
            ClusterError: this worker missed an earlier step.
            WorkerFailedError: this worker missed an earlier step because another worker failed.
        """
        return _GuardedCall(self, but, is_step, is_before)

    def begin(self) -> None:
        """Begins a collective call; see `guarding`."""
        self._raise_if_missed()
        self._met_by_all = None

    def end(self, error: BaseException | None, is_step: bool, is_before: bool) -> None:
        """Ends a collective call, which may have raised an error that not all workers raise; see `guarding`."""
        if error is None:
            self._last_step_at = time.monotonic() if is_step else self._last_step_at
        elif self._others_wait():
            self._settle(error, is_before)
        else:
            self._note_refused(error)

    @contextmanager
    def guarding_until_step(self) -> Iterator[None]:
        """Context of a call that makes steps: an error before the first step refuses that step."""
        began = time.monotonic()
        try:
            yield
        except Exception as error:
            if not self._others_wait():
                self._note_refused(error)
            elif not self and not self.has_stepped_since(began):
                with self.step_lock:
                    self._settle(error, is_before=True)
            raise

    def note(self, error: BaseException) -> None:
        """Records an error that keeps this worker alone from reaching the next step."""
        if self._error is None:
            self._record(error)

    def end_run(self, error: ClusterError) -> None:
        """Raises `error` in all later calls: the run has ended, and the process goes on."""
        self._error, self._is_over = error, True

    def close(self, is_survived: bool = False) -> None:
        """Stops the timer at the end of the script.

        Args:
            is_survived: True if the script ends well, so that its exit status does not show the missed step.
        """
        if self._timer is not None:
            self._timer.cancel()
            if is_survived and self._error is not None:
                self._survive(self._error)

    def _note_refused(self, error: BaseException) -> None:
        if isinstance(error, Exception) and not self.has_stepped:
            self.refused = summary_of(error)  # a text, since the error would keep the arguments of the step alive

    def _settle(self, error: BaseException, is_before: bool) -> None:
        if error is self._error or error is self._met_by_all:
            return  # an inner context has settled it
        self._error = error  # set first, in case Ctrl-C interrupts the wait for the other workers' answers
        if self._is_met_by_all(error, is_before):
            self._error, self._met_by_all = None, error
        else:
            self._record(error)

    def _record(self, error: BaseException) -> None:
        self._error = error
        if isinstance(error, Exception) and not isinstance(error, WorkerFailedError):  # Ctrl-C already ends the run
            self._timer = threading.Timer(self._end_limit, self._survive, (error,))
            self._timer.name, self._timer.daemon = "autodist-missed-step", True
            self._timer.start()

    def _survive(self, error: BaseException) -> None:
        with self._surviving:
            is_first, self._is_survived = not self._is_survived, True
        if is_first:
            self._on_survived(error)

    def _raise_if_missed(self) -> None:
        if isinstance(self._error, WorkerFailedError) or (self._is_over and self._error is not None):
            raise self._error
        if self._error is not None:
            error = f"{type(self._error).__name__}: {words_of(self._error)}"
            if isinstance(self._error, Exception):  # Ctrl-C already ends the run
                self._survive(self._error)
            raise ClusterError(
                f"this worker failed in an earlier step ({error}) and its script went on, while the other workers wait "
                "for that step. Let the script end with the error that a step raises."
            ) from self._error


class _GuardedCall(AbstractContextManager[None]):
    """Context of a collective call; a class, since each step has several and a generator takes longer."""

    __slots__ = ("_but", "_guard", "_is_before", "_is_step")

    def __init__(
        self, guard: FailedStepGuard, but: type[Exception] | tuple[type[Exception], ...], is_step: bool, is_before: bool
    ) -> None:
        self._guard, self._but, self._is_step, self._is_before = guard, but, is_step, is_before

    def __enter__(self) -> None:
        self._guard.step_lock.__enter__()
        try:
            self._guard.begin()
        except BaseException:
            self._guard.step_lock.__exit__(None, None, None)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None or not isinstance(error, self._but):  # Ctrl-C, too
                self._guard.end(error, self._is_step, self._is_before)
        finally:
            self._guard.step_lock.__exit__(None, None, None)
