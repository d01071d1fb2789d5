"""Stall detection: ends a run in which workers wait forever for each other or for a worker that does not answer."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from autodist.cluster.protocol import Doing, Progress
from autodist.cluster.timeouts import Stopwatch
from autodist.waits import start_thread

_log = logging.getLogger("autodist.cluster")

_POLL_INTERVAL = 5.0

_BUSY = 0.1
"""Seconds of CPU time per second; a process that only waits for messages uses less."""

_WOULD_BE_BUSY = 0.5
"""Seconds per second in which its threads ran or waited for a processor. On an overloaded machine, a process that
computes gets little CPU time."""

_HEARTBEATS = 2.0
"""Seconds in which at least one heartbeat of an agent on another machine arrives."""

SAME_STEPS = (
    "Every worker has to run the same steps: check that each has the same number of batches and the same callbacks "
    "that may end the training, and that no step, reduce or other call of all workers is in code that only some run."
)


_WAITS_IN = (Doing.JOINING, Doing.STEPPING)
"""Activities in which a worker may wait for other workers."""


@dataclass(frozen=True)
class WorkerProgress:
    """Two observations of one worker.

    Attributes:
        name: name of the worker.
        before: its progress at the first observation; None if it did not answer, or was not observed before.
        now: its progress at the second observation; None if the worker has not answered yet.
        between: seconds between the two.
        since_answer: time since its last answer, in seconds of a `Stopwatch`.
        since_message: time since the last message of its agent, including heartbeats, in the same unit.
    """

    name: str
    before: Progress | None
    now: Progress | None
    between: float
    since_answer: float = 0.0
    since_message: float = 0.0

    @property
    def waits(self) -> bool:
        """True if the worker was in one step at both observations and did not compute."""
        if self.before is None or self.now is None or self.now.doing != Doing.STEPPING or self.now.since < self.between:
            return False
        ran = self.now.processor - self.before.processor
        demand = ran + self.now.queued - self.before.queued
        return ran < _BUSY * self.between and demand < _WOULD_BE_BUSY * self.between

    @property
    def is_held_up(self) -> bool:
        """True if the worker was in one step or at its end at both observations, and may wait for another worker."""
        return self.is_done or (self.now is not None and self.now.doing in _WAITS_IN and self.since >= self.between)

    @property
    def has_joined(self) -> bool:
        return self.now is None or self.now.doing != Doing.JOINING

    @property
    def is_done(self) -> bool:
        return self.now is not None and self.now.doing == Doing.DONE

    @property
    def since(self) -> float:
        return 0.0 if self.now is None else self.now.since

    def needs(self, other: WorkerProgress) -> bool:
        """Returns True if this worker is in a collective call that another one, whose script has ended, never makes."""
        if self.now is None or other.now is None or not other.is_done or self.now.doing != Doing.STEPPING:
            return False
        return self.now.calls is not None and other.now.calls is not None and self.now.calls > other.now.calls


@dataclass(frozen=True)
class Stall:
    """The reason that a run cannot continue.

    Attributes:
        worker: name of the worker to report.
        reason: reason for a `WorkerFailedError`.
        is_lost: True if the connection to the worker counts as lost.
    """

    worker: str
    reason: str
    is_lost: bool = False


@dataclass(frozen=True)
class Limits:
    """Time limits in seconds; see `resources.Timeouts`."""

    stall: float
    answer: float
    deadlock: float

    @property
    def poll_interval(self) -> float:
        """Seconds between two observations of the other workers."""
        return min(_POLL_INTERVAL, self.stall / 4, self.answer / 4, self.deadlock / 4)


def find_stall(chief: WorkerProgress, others: Mapping[str, WorkerProgress], limits: Limits) -> Stall | None:
    """Returns the reason that the run can never continue, if that is certain, else None.

    It is certain if a process does not answer, if a worker is in a collective call and the script of another one has
    ended before it, or if all workers whose scripts run wait in steps and compute nothing.
    """
    everyone = [chief, *others.values()]
    missing = [one for one in everyone if any(seen.needs(one) for seen in everyone)]
    if missing:
        return _missed(chief, missing, [seen for seen in everyone if any(seen.needs(one) for one in missing)])
    for seen in others.values():
        if seen.since_answer >= limits.answer:
            return _unanswered(seen, _while_waited_for([one.name for one in everyone if one.is_held_up]), limits)
    waiting = [seen for seen in everyone if seen.waits]
    if not waiting or not all(seen.waits or seen.is_done for seen in everyone):
        return None
    longest = max(seen.since for seen in waiting)
    ended = [seen for seen in everyone if seen.is_done]
    if ended:
        return _missed(chief, ended, waiting) if longest >= limits.stall else None
    if longest < limits.deadlock:
        return None
    return Stall(
        next(iter(others)), f"and all others have waited for one another for {longest:.0f} s, in different steps. "
        f"{SAME_STEPS} If they do, check that the network and firewalls pass what TensorFlow's servers send. If a step "
        "waits for something else, raise `deadlock_timeout`."
    )  # fmt: skip


def _unanswered(worker: WorkerProgress, while_waited_for: str, limits: Limits) -> Stall:
    """Returns the stall of a worker that does not answer; blames its machine if its agent is silent, too."""
    if worker.since_message >= max(limits.answer / 2, _HEARTBEATS):
        return Stall(
            worker.name, f"was lost: nothing was heard from its machine for {worker.since_message:.0f} s"
            f"{while_waited_for}; check that the machine and the network to it are up; if the network pauses for "
            "longer, raise `answer_timeout`", is_lost=True,
        )  # fmt: skip
    return Stall(
        worker.name, f"has not answered for {limits.answer:g} s{while_waited_for}: its process was stopped, "
        "or runs code that blocks its other threads; if that may take so long, raise `answer_timeout`"
    )  # fmt: skip


def _while_waited_for(names: list[str]) -> str:
    if not names:
        return ""
    return f", while {' and '.join(names)} wait{'s' if len(names) == 1 else ''} for it"


def _missed(chief: WorkerProgress, ended: list[WorkerProgress], waiting: list[WorkerProgress]) -> Stall:
    waiters = " and ".join(seen.name for seen in waiting) + (" waits" if len(waiting) == 1 else " wait")
    if ended == [chief]:
        return Stall(waiting[0].name, f"waits in a step for {chief.name}, whose script has ended. {SAME_STEPS}")
    first = next(seen for seen in ended if seen is not chief)
    return Stall(first.name, f"has ended its script, and {waiters} for it in a further step. {SAME_STEPS}")


class ProgressSource(Protocol):
    """The methods of the coordinator that `StallWatch` calls."""

    def request_progress(self, limit: float, are_starting: bool) -> dict[str, Progress | None] | None: ...

    def take_senders(self) -> set[str]: ...

    def wait_for_end(self, timeout: float) -> bool: ...

    def end_with_failure(self, worker: str, reason: str, is_lost: bool) -> None: ...


class StallWatch:
    """Observes the other workers while the chief waits for them; ends the run if it can never continue.

    Before the first step, workers may import, read and trace for any time; only a worker whose process is stopped
    counts as one that does not answer.

    If the run may continue, since a worker is busy outside of a step, this is logged at intervals that double.

    Args:
        coordinator: coordinator of the run.
        chief: name of this worker.
        progress: returns the progress of this worker.
        limits: time limits.
    """

    def __init__(
        self, coordinator: ProgressSource, chief: str, progress: Callable[[], Progress], limits: Limits
    ) -> None:
        self._coordinator, self._chief, self._progress, self._limits = coordinator, chief, progress, limits
        self._reset()
        start_thread("stalls", self._watch)

    def _reset(self) -> None:
        """Starts a new wait of the chief."""
        self._log_after = self._limits.stall
        self._before: tuple[float, Progress, Mapping[str, Progress | None]] | None = None
        self._stopwatch = Stopwatch(self._limits.poll_interval)
        self._last_answer: dict[str, float] = {}
        self._last_heard: dict[str, float] = {}

    def _watch(self) -> None:
        interval = self._limits.poll_interval
        while not self._coordinator.wait_for_end(interval):
            own_progress = self._progress()
            if own_progress.doing == Doing.ELSE or own_progress.since < interval:
                self._reset()
            else:
                self._observe()

    def _observe(self) -> None:
        observed_at, own_progress = time.monotonic(), self._progress()
        requested_at, is_joining = self._stopwatch.read(), own_progress.doing == Doing.JOINING
        answers = self._coordinator.request_progress(self._limits.poll_interval / 2, is_joining)
        if answers is None:
            return
        answered_at, heard = self._stopwatch.read(), self._coordinator.take_senders()
        for name, answer in answers.items():
            self._last_answer[name] = self._last_answer.get(name, requested_at) if answer is None else answered_at
            self._last_heard[name] = answered_at if name in heard else self._last_heard.get(name, requested_at)
        before, self._before = self._before, (observed_at, own_progress, answers)
        between = 0.0 if before is None else time.monotonic() - before[0]
        chief = WorkerProgress(self._chief, None if before is None else before[1], self._progress(), between)
        others = {
            name: WorkerProgress(
                name,
                None if before is None else before[2][name],
                now,
                between,
                answered_at - self._last_answer[name],
                answered_at - self._last_heard[name],
            )
            for name, now in answers.items()
        }
        stall = find_stall(chief, others, self._limits)
        if stall is not None:
            self._coordinator.end_with_failure(stall.worker, stall.reason, stall.is_lost)
        elif chief.since >= self._log_after:
            self._log_after = 2 * chief.since
            self._log_wait(chief, others)

    def _log_wait(self, chief: WorkerProgress, others: Mapping[str, WorkerProgress]) -> None:
        late = [f"{name} (for {seen.since:.0f} s)" for name, seen in others.items() if _is_elsewhere(seen)]
        if late:
            place = "the end of its script" if chief.is_done else "a step" if chief.has_joined else "its first step"
            _log.warning(
                "%s has waited %.0f s, in %s, for workers that are outside of any step: %s.",
                chief.name, chief.since, place, ", ".join(late),
            )  # fmt: skip


def _is_elsewhere(seen: WorkerProgress) -> bool:
    return seen.now is not None and seen.now.doing == Doing.ELSE
