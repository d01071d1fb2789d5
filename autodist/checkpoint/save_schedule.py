"""Determines the steps after which a run is saved: by a schedule, which is the same on all workers, and on SIGTERM."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

from autodist.cluster.failure import LEAVING
from autodist.cluster.preemption_notice import PreemptionNotice
from autodist.cluster.script_end import watch_script_end
from autodist.errors import ResourceSpecError
from autodist.runs.joining_search import JoiningSearch, LateProcesses, MissingMachines
from autodist.runs.lost_run import Joining
from autodist.runs.restarts import may_start_again
from autodist.runs.run import Run

LOOK_SECONDS = 1.0
"""Approximate interval at which the chief shares its clock and its requests with the other workers."""


class Schedule:
    """Decides between two steps if the run is saved now; every worker calls it before the same steps.

    A schedule by steps needs no communication. For one by time and for requests, the chief broadcasts its clock and its
    requests in an exchange about every `LOOK_SECONDS`. Each exchange also sets the number of steps until the next one,
    from the duration of the last steps.

    Args:
        is_chief: True if this worker is the chief.
        share: broadcasts the chief's value to all workers; a collective call.
        every_steps: the number of steps between two saves; None: no schedule by steps.
        every_minutes: the minutes between two saves, by the chief's clock; None: no schedule by time.
        step: number of steps already done.
        clock: returns seconds.

    Attributes:
        saved_step: number of steps at the last save, or at the start.
    """

    def __init__(
        self,
        is_chief: bool,
        share: Callable[[str], str],
        every_steps: int | None,
        every_minutes: float | None,
        step: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._is_chief, self._share, self._clock = is_chief, share, clock
        self._every_steps, self._every_seconds = every_steps, None if every_minutes is None else 60 * every_minutes
        self.saved_step = step
        self._saved_at = self._looked_at = clock()
        self._looked_step, self._apart, self._next_look = step, 1, step + 1
        self._is_requested = False
        self._after_save: list[Callable[[], None]] = []

    def request(self, then: Callable[[], None]) -> None:
        """On the chief, requests a save at the next exchange. Safe in any thread and in a signal handler.

        Args:
            then: called after the save.
        """
        self._after_save.append(then)  # first: `saved` calls it and may run in between
        self._is_requested = True

    def is_due(self, step: int) -> bool:
        """Returns True if a save is due now.

        Args:
            step: number of steps done.
        """
        if step <= self.saved_step:
            return False
        is_due = self._every_steps is not None and step // self._every_steps > self.saved_step // self._every_steps
        if step >= self._next_look:
            is_due = self._look(step) or is_due
        return is_due

    def saved(self, step: int) -> None:
        """Records a save, whatever its cause."""
        self.saved_step, self._saved_at = step, self._clock()
        self._is_requested = False
        requested, self._after_save = self._after_save, []
        for then in requested:
            then()

    def _look(self, step: int) -> bool:
        now, decision = self._clock(), [False, 0]
        if self._is_chief:
            is_time = self._every_seconds is not None and now - self._saved_at >= self._every_seconds
            taken = max((now - self._looked_at) / (step - self._looked_step), 1e-9)
            decision = [is_time or self._is_requested, max(1, min(2 * self._apart, int(LOOK_SECONDS / taken)))]
        is_due, self._apart = json.loads(self._share(json.dumps(decision)))
        self._looked_at, self._looked_step, self._next_look = now, step, step + self._apart
        return bool(is_due)


log = logging.getLogger("autodist")


class SaveRequest(ABC):
    """On the chief, requests a save at the next common step, after which `_end` ends the script.

    Args:
        run: the run to save.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._schedules: list[Schedule] = []
        self._is_requested = False

    def watch(self, schedule: Schedule) -> None:
        """Adds a schedule that saves the run; of several, one is in use at a time."""
        self._schedules.append(schedule)
        if self._is_requested:
            schedule.request(self._end)

    def _request_save(self) -> None:
        self._is_requested = True
        for schedule in self._schedules:
            schedule.request(self._end)

    @abstractmethod
    def _end(self) -> NoReturn:
        """Ends the script after the save."""


class Growth(SaveRequest):
    """On the chief, looks for machines that the run does not have, and starts it again with those that it can use.

    A run that makes no further training step, or is lost before it, does not start again with them.

    Args:
        run: the run.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._joining: Joining | None = None
        self._machines: JoiningSearch = (
            LateProcesses(run.spec, self._save_for)
            if run.spec.is_given
            else MissingMachines(run.spec, run.builder, self._save_for)
        )

    def begin(self) -> None:
        """Starts to look, until the end of the run."""
        self._run.end.missing_machines = self._machines
        self._run.end.before.append(self._machines.end)
        self._machines.begin()

    def _save_for(self, joining: Joining) -> None:
        """Called in another thread."""
        log.info("%s: the run is saved after its next step, and then starts again.", joining.reason)
        self._joining = joining
        self._request_save()

    def _end(self) -> NoReturn:
        assert self._joining is not None, "the save was requested for them"
        self._run.end.start_again_with(self._joining)


class Preemption(SaveRequest):
    """On the chief, saves the run at the next common step after SIGTERM to the chief or another worker, and ends it.

    The run then ends as by an exception: other workers are stopped, `finally` blocks and exit handlers run, and the
    signal ends the process. It ends at once between two steps without training since the last save. It also ends
    at once in a lost run, where no step will come, and after a second SIGTERM to the chief, unless it is a repeat
    (`PreemptionNotice`). If SIGTERM came only to other workers and the run may restart, the run counts as lost by the
    first of these workers instead.

    Args:
        run: the run to save.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._has_come = False
        self._notice = PreemptionNotice()
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
        self._run.end.watch_leaving(self._note_leaving)

    def _note(self, number: int, frame: FrameType | None) -> None:
        is_saved = any(schedule.saved_step >= self._run.step for schedule in self._schedules)
        is_notice = self._notice.includes_this()
        if not is_notice or self._run.end.is_lost or (is_saved and not self._run.is_in_step):
            self._end_by_signal("SIGTERM came")
        if self._has_come:
            return
        self._has_come = self._run.end.is_leaving = True
        log.warning("SIGTERM: the run is saved after this step, and then ends; another SIGTERM ends it at once.")
        self._request_save()

    def _note_leaving(self, worker: str) -> None:
        """Called in another thread. If the script runs no more steps, it ends as usual."""
        if self._leaving is None:
            self._leaving = worker
        then = "restarts" if may_start_again(self._run.spec) else "ends"
        log.warning("SIGTERM came to %s: the run is saved after this step, and then %s.", worker, then)
        self._request_save()

    def _end(self) -> NoReturn:
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
