"""Preemption: SIGTERM, by which a spot machine says that it goes away, saves what is trained before it ends the run."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from types import FrameType
from typing import NoReturn

from autodist.checkpoint.schedule import Schedule
from autodist.cluster.script_end import watch_script_end
from autodist.errors import ResourceSpecError
from autodist.run import Run

log = logging.getLogger("autodist")


class Preemption:
    """On the chief: the first SIGTERM has the run saved at the next step to which all come, and then ended by it.

    Where nothing was trained since the last save, and with the second one, it ends at once, as an exception would:
    other workers are stopped, `finally` and exit handlers run, and the process ends by the signal.

    Args:
        run: that is saved.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._schedules: list[Schedule] = []
        self._is_asked = False

    def begin(self) -> None:
        """From now on SIGTERM comes here.

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

    def watch(self, schedule: Schedule) -> None:
        """A schedule by which the run is saved; there may be several, of which one is in use at a time."""
        self._schedules.append(schedule)
        if self._is_asked:
            schedule.ask(self._end)

    def _note(self, number: int, frame: FrameType | None) -> None:
        is_saved = any(schedule.saved_step >= self._run.step for schedule in self._schedules)
        if self._is_asked or is_saved:
            self._end()
        self._is_asked = True
        log.warning("SIGTERM: what is trained is saved after this step, and the run ends; another one ends it at once.")
        for schedule in self._schedules:
            schedule.ask(self._end)

    def _end(self) -> NoReturn:
        self._run.end_reason = f"SIGTERM came; {self._run.step} steps were made"
        watch_script_end().end_by(signal.SIGTERM)
        sys.exit(128 + signal.SIGTERM)

    def _forget(self) -> None:
        if signal.getsignal(signal.SIGTERM) == self._note:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
