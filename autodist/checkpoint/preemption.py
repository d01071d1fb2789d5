"""Preemption: on SIGTERM, the shutdown notice of a spot machine, saves the training state before the run ends."""

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
    """On the chief, saves the run at the next common step after SIGTERM to the chief or another worker, and ends it.

    The run then ends as by an exception: other workers are stopped, `finally` blocks and exit handlers run, and the
    signal ends the process. It ends at once between two steps without training since the last save. It also ends
    at once in a lost run, where no step will come, and after a second SIGTERM to the chief. If SIGTERM came only to
    other workers and the run may restart, the run counts as lost by the first of these workers instead.

    Args:
        run: the run to save.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._schedules: list[Schedule] = []
        self._has_come = self._is_requested = False
        self._leaving: str | None = None

    def begin(self) -> None:
        """Installs the handler for SIGTERM.

        Raises:
            ResourceSpecError: it cannot be installed, or the script handles SIGTERM.
        """
        if threading.current_thread() is not threading.main_thread():
            raise ResourceSpecError(
                "checkpoint.on_preempt needs SIGTERM, which Python handles only in the main thread; create the "
                "AutoDist there."
            )
        handler = signal.getsignal(signal.SIGTERM)
        if handler is not signal.SIG_DFL and not isinstance(getattr(handler, "__self__", None), Preemption):
            raise ResourceSpecError(
                "checkpoint.on_preempt saves at SIGTERM, but the script has a handler of its own; remove that handler, "
                "or on_preempt."
            )
        signal.signal(signal.SIGTERM, self._note)
        os.register_at_fork(after_in_child=self._forget)
        self._run.end.heed_leaving(self._note_leaving)

    def watch(self, schedule: Schedule) -> None:
        """Adds a schedule that saves the run; of several, one is in use at a time."""
        self._schedules.append(schedule)
        if self._is_requested:
            schedule.request(self._end)

    def _note(self, number: int, frame: FrameType | None) -> None:
        is_saved = any(schedule.saved_step >= self._run.step for schedule in self._schedules)
        if self._has_come or self._run.end.is_lost or (is_saved and not self._run.is_in_step):
            self._end_by_signal("SIGTERM came")
        self._has_come = self._run.end.is_leaving = True
        log.warning("SIGTERM: the run is saved after this step, and then ends; another SIGTERM ends it at once.")
        self._request_save()

    def _note_leaving(self, worker: str) -> None:
        """Called in another thread; a script that does no more steps ends as usual."""
        if self._leaving is None:
            self._leaving = worker
        then = "restarts" if may_start_again(self._run.spec) else "ends"
        log.warning("SIGTERM came to %s: the run is saved after this step, and then %s.", worker, then)
        self._request_save()

    def _request_save(self) -> None:
        self._is_requested = True
        for schedule in self._schedules:
            schedule.request(self._end)

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
