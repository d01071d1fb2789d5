"""A step that failed on one worker and that its script survived."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from autodist.errors import ClusterError, WorkerFailedError
from autodist.logs.formatting import words_of


class FailedStepGuard:
    """Sees to it that a worker which failed in a step takes part in no later one.

    The others wait for the step that it missed; they would take its next part for that one's, and at the end wait for
    ever. A script that survives the error ends the others when it makes its next step, and after `patience` at the
    latest.

    Args:
        others_wait: tells whether other workers have joined, which would wait for this one.
        turn: held during a step, where threads of the script have to take turns.
        is_met_by_all: returns True if all workers have raised the same kind of error here, and nothing has run. The
            second argument is True where the error was raised before the step, of whatever kind it is.
        on_survived: called once with the error of a missed step, when the script goes on after it; from any thread.
        patience: seconds in which a script that does not survive the error has ended.

    Attributes:
        turn: as given.
    """

    def __init__(
        self,
        others_wait: Callable[[], bool],
        turn: AbstractContextManager[object] | None = None,
        is_met_by_all: Callable[[BaseException, bool], bool] = lambda error, is_before: False,
        on_survived: Callable[[BaseException], None] = lambda error: None,
        patience: float = 8.0,
    ) -> None:
        self._others_wait, self.turn = others_wait, turn or nullcontext()
        self._is_met_by_all, self._on_survived, self._patience = is_met_by_all, on_survived, patience
        self._surviving = threading.Lock()
        self._is_survived = False
        self._waiting: threading.Timer | None = None
        self._error: BaseException | None = None
        self._made_at: float | None = None

    def __bool__(self) -> bool:
        """Whether a step was missed."""
        return self._error is not None

    @property
    def error(self) -> BaseException | None:
        """What a step was missed by; None: none was."""
        return self._error

    def has_made_one_since(self, moment: float) -> bool:
        """Whether a step was made later than `moment`, by `time.monotonic`."""
        return self._made_at is not None and self._made_at > moment

    @contextmanager
    def noted(
        self,
        but: type[Exception] | tuple[type[Exception], ...] = (),
        is_step: bool = True,
        is_before: bool = False,
    ) -> Iterator[None]:
        """Around what all workers do alike: notes it as missed if it raises here.

        Args:
            but: exceptions that all workers raise alike, after which the script may go on.
            is_step: whether it is a step, which shows that this worker goes on with the others.
            is_before: whether it only comes before a step, which any exception refuses.

        Raises:
            ClusterError: this worker missed an earlier step.
            WorkerFailedError: it did since another worker ended badly.
        """
        with self.turn:
            self._require_none()
            try:
                yield
            except BaseException as error:  # Ctrl-C, too
                if self._others_wait() and not isinstance(error, but):
                    self._settle(error, is_before)
                raise
            if is_step:
                self._made_at = time.monotonic()

    @contextmanager
    def noted_until_step(self) -> Iterator[None]:
        """Around a call that makes steps: what it raises before the first of them refuses that one."""
        began = time.monotonic()
        try:
            yield
        except Exception as error:
            if self._others_wait() and not self and not self.has_made_one_since(began):
                with self.turn:
                    self._settle(error, is_before=True)
            raise

    def note(self, error: BaseException) -> None:
        """Notes what has kept this worker alone from coming to the next step."""
        if self._error is None:
            self._miss(error)

    def close(self) -> None:
        """The script ends, which ends the run for the others."""
        if self._waiting is not None:
            self._waiting.cancel()

    def _settle(self, error: BaseException, is_before: bool) -> None:
        self._error = error  # also if Ctrl-C ends the wait for what the others have met
        if self._is_met_by_all(error, is_before):
            self._error = None
        else:
            self._miss(error)

    def _miss(self, error: BaseException) -> None:
        self._error = error
        if isinstance(error, Exception) and not isinstance(error, WorkerFailedError):  # Ctrl-C ends the run by itself
            self._waiting = threading.Timer(self._patience, self._survive, (error,))
            self._waiting.name, self._waiting.daemon = "autodist-missed-step", True
            self._waiting.start()

    def _survive(self, error: BaseException) -> None:
        with self._surviving:
            is_first, self._is_survived = not self._is_survived, True
        if is_first:
            self._on_survived(error)

    def _require_none(self) -> None:
        if isinstance(self._error, WorkerFailedError):
            raise self._error
        if self._error is not None:
            told = f"{type(self._error).__name__}: {words_of(self._error)}"
            if isinstance(self._error, Exception):  # Ctrl-C ends the run in its own way
                self._survive(self._error)
            raise ClusterError(
                f"this worker failed in an earlier step ({told}) and its script went on, while the other workers wait "
                "for that step. Let what a step raises end the script."
            ) from self._error
