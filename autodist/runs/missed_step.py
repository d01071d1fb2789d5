"""A step that failed on one worker and that its script survived."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from autodist.error_words import words_of
from autodist.errors import ClusterError, WorkerFailedError


class MissedStep:
    """Sees to it that a worker which failed in a step takes part in no later one.

    The others wait for the step that it missed; they would take its next part for that one's, and at the end wait for
    ever.

    Args:
        others_wait: tells whether other workers have joined, which would wait for this one.
        turn: held during a step, where threads of the script have to take turns.
        is_met_by_all: returns True if all workers have raised the same kind of error here, and nothing has run.
        on_survived: called once with the error of a missed step, when the script goes on after it.

    Attributes:
        turn: as given.
    """

    def __init__(
        self,
        others_wait: Callable[[], bool],
        turn: AbstractContextManager[object] | None = None,
        is_met_by_all: Callable[[BaseException], bool] = lambda error: False,
        on_survived: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        self._others_wait, self.turn = others_wait, turn or nullcontext()
        self._is_met_by_all, self._on_survived = is_met_by_all, on_survived
        self._is_survived = False
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
    def noted(self, but: type[Exception] | tuple[type[Exception], ...] = (), is_step: bool = True) -> Iterator[None]:
        """Around what all workers do alike: notes it as missed if it raises here.

        Args:
            but: exceptions that all workers raise alike, after which the script may go on.
            is_step: whether it is a step, which shows that this worker goes on with the others.

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
                    self._error = error  # also if Ctrl-C ends the wait for what the others have met
                    if self._is_met_by_all(error):
                        self._error = None
                raise
            if is_step:
                self._made_at = time.monotonic()

    def note(self, error: BaseException) -> None:
        """Notes what has kept this worker alone from coming to the next step."""
        self._error = self._error or error

    def _require_none(self) -> None:
        if isinstance(self._error, WorkerFailedError):
            raise self._error
        if self._error is not None:
            told = f"{type(self._error).__name__}: {words_of(self._error)}"
            if not self._is_survived and isinstance(self._error, Exception):  # Ctrl-C ends the run in its own way
                self._is_survived = True
                self._on_survived(self._error)
            raise ClusterError(
                f"this worker failed in an earlier step ({told}) and its script went on, while the other workers wait "
                "for that step. Let what a step raises end the script."
            ) from self._error
