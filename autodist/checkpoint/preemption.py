"""Preemption: SIGTERM, by which a spot machine says that it goes away, saves what is trained before it ends the run."""

from __future__ import annotations

import logging
import os
import signal
import threading
from types import FrameType
from typing import NoReturn

from autodist.checkpoint.save_schedule import Schedule
from autodist.cluster.failure import LEAVING
from autodist.cluster.script_end import watch_script_end
from autodist.errors import ResourceSpecError
from autodist.runs.restarts import may_start_again
from autodist.runs.run import Run

log = logging.getLogger("autodist")


class Preemption:
    """On the chief: SIGTERM, to it or to another worker, has the run saved at the next step to which all come.

    Then the run is ended by it, as by an exception: other workers are stopped, `finally` and exit handlers run, and the
    process ends by the signal. So it is at once between two steps where nothing was trained since the last save, where
    the run is lost, so that no step comes, and with a second one to the chief. Where it came to others alone and the
    run may start again, it is lost by the first of them instead.

    Args:
        run: that is saved.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._schedules: list[Schedule] = []
        self._has_come = self._is_asked = False
        self._leaving: str | None = None

    def begin(self) -> None:
        """Handles SIGTERM from now on.

        Raises:
            ResourceSpecError: it cannot, or the script handles it.
        """
        if threading.current_thread() is not threading.main_thread():
            raise ResourceSpecError(
                "checkpoint.on_preempt needs SIGTERM, which Python handles in the main thread alone; make the AutoDist "
                "there."
            )
        handler = signal.getsignal(signal.SIGTERM)
        if handler is not signal.SIG_DFL and not isinstance(getattr(handler, "__self__", None), Preemption):
            raise ResourceSpecError(
                "checkpoint.on_preempt saves at SIGTERM, and the script handles that itself; leave its handler out, or "
                "on_preempt."
            )
        signal.signal(signal.SIGTERM, self._note)
        os.register_at_fork(after_in_child=self._forget)
        self._run.end.heed_leaving(self._note_leaving)

    def watch(self, schedule: Schedule) -> None:
        """A schedule by which the run is saved; there may be several, of which one is in use at a time."""
        self._schedules.append(schedule)
        if self._is_asked:
            schedule.ask(self._end)

    def _note(self, number: int, frame: FrameType | None) -> None:
        is_saved = any(schedule.saved_step >= self._run.step for schedule in self._schedules)
        if self._has_come or self._run.end.is_lost or (is_saved and not self._run.is_in_step):
            self._end_by_signal("SIGTERM came")
        self._has_come = self._run.end.is_leaving = True
        log.warning("SIGTERM: what is trained is saved after this step, and the run ends; another one ends it at once.")
        self._ask()

    def _note_leaving(self, worker: str) -> None:
        """In another thread, and so that a script which makes no more steps ends as it would have."""
        if self._leaving is None:
            self._leaving = worker
        then = "starts again" if may_start_again(self._run.spec) else "ends"
        log.warning("SIGTERM came to %s: what is trained is saved after this step, and the run %s.", worker, then)
        self._ask()

    def _ask(self) -> None:
        self._is_asked = True
        for schedule in self._schedules:
            schedule.ask(self._end)

    def _end(self) -> None:
        if self._has_come or self._leaving is None:
            self._end_by_signal("SIGTERM came")
        if may_start_again(self._run.spec):
            self._run.end.lose(self._leaving, LEAVING)
        self._end_by_signal(f"SIGTERM came to {self._leaving}")

    def _end_by_signal(self, why: str) -> NoReturn:
        self._run.end.reason = f"{why}; {self._run.step} steps were made"
        watch_script_end().end_script_by(signal.SIGTERM)

    def _forget(self) -> None:
        if signal.getsignal(signal.SIGTERM) == self._note:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
