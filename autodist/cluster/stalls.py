"""Stalls: workers that wait for one another, or for one that does not answer, and would for ever."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from autodist.cluster.load_adjusted_clock import Stopwatch
from autodist.cluster.protocol import Doing, Progress

_log = logging.getLogger("autodist.cluster")

_LOOK_INTERVAL = 5.0

_BUSY = 0.1
"""Seconds of processor time a second; a process that only waits for messages takes less."""

_WOULD_BE_BUSY = 0.5
"""Seconds a second of which its threads ran or waited for a processor. On a machine with more to do than it has
processors, a process that computes gets little time of them."""

_HEARTBEATS = 2.0
"""Seconds in which at least one heartbeat of an agent on another machine arrives."""

SAME_STEPS = (
    "Every worker has to make the same steps: see that each has as many batches, and the same callbacks that may end "
    "the training, and that no step, pull or reduce stands where only some workers come by."
)


_WAITS_IN = (Doing.JOINING, Doing.STEPPING)
"""What a worker may do that others hold up."""


@dataclass(frozen=True)
class Seen:
    """One worker, looked at twice.

    Attributes:
        name: of the worker.
        before: what it did then; None if it did not answer.
        now: what it does now; None if it has not answered yet.
        between: seconds between the two.
        silent: for how long it has not answered, in seconds of a `Stopwatch`.
        unheard: for how long its agent has sent nothing, not even a heartbeat, in the same seconds.
    """

    name: str
    before: Progress | None
    now: Progress | None
    between: float
    silent: float = 0.0
    unheard: float = 0.0

    @property
    def waits(self) -> bool:
        """Whether it has been in one step all the while, without computing."""
        if self.before is None or self.now is None or self.now.doing != Doing.STEPPING or self.now.since < self.between:
            return False
        ran = self.now.processor - self.before.processor
        wanted = ran + self.now.queued - self.before.queued
        return ran < _BUSY * self.between and wanted < _WOULD_BE_BUSY * self.between

    @property
    def is_held_up(self) -> bool:
        """Whether it has been in one step, or at its end, all the while: one that does not answer may be why."""
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


@dataclass(frozen=True)
class Stall:
    """Why a run cannot go on.

    Attributes:
        worker: the one that is named.
        reason: as in `WorkerFailedError`.
        is_lost: as in `Ending`.
    """

    worker: str
    reason: str
    is_lost: bool = False


@dataclass(frozen=True)
class Limits:
    """Seconds; `resources.Timeouts` says what each is for."""

    stall: float
    answer: float
    deadlock: float

    @property
    def look_interval(self) -> float:
        """Between two looks at the others."""
        return min(_LOOK_INTERVAL, self.stall / 4, self.answer / 4, self.deadlock / 4)


def find_stall(chief: Seen, others: Mapping[str, Seen], limits: Limits) -> Stall | None:
    """Why the run can never go on, if that is certain.

    It is if a process does not answer, or if all whose scripts have not ended wait in steps and compute nothing.
    """
    everyone = [chief, *others.values()]
    for seen in others.values():
        if seen.silent >= limits.answer:
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
        f"{SAME_STEPS} Where a step waits for something else, raise `deadlock_timeout`."
    )  # fmt: skip


def _unanswered(worker: Seen, while_waited_for: str, limits: Limits) -> Stall:
    """Names the machine where its agent is silent too, and else the worker's process."""
    if worker.unheard >= max(limits.answer / 2, _HEARTBEATS):
        return Stall(
            worker.name, f"was lost: nothing was heard from its machine for {worker.unheard:.0f} s{while_waited_for}; "
            "see whether the machine is up, and the network to it; where that pauses for longer, raise "
            "`answer_timeout`", is_lost=True,
        )  # fmt: skip
    return Stall(
        worker.name, f"has not answered for {limits.answer:g} s{while_waited_for}: its process was stopped, "
        "or runs code that lets nothing else of it run; if that may take so long, raise `answer_timeout`"
    )  # fmt: skip


def _while_waited_for(names: list[str]) -> str:
    if not names:
        return ""
    return f", while {' and '.join(names)} wait{'s' if len(names) == 1 else ''} for it"


def _missed(chief: Seen, ended: list[Seen], waiting: list[Seen]) -> Stall:
    who = " and ".join(seen.name for seen in waiting) + (" waits" if len(waiting) == 1 else " wait")
    if ended == [chief]:
        return Stall(waiting[0].name, f"waits in a step for {chief.name}, whose script has ended. {SAME_STEPS}")
    first = next(seen for seen in ended if seen is not chief)
    return Stall(first.name, f"has ended its script, and {who} for it in a further step. {SAME_STEPS}")


class AsksWorkers(Protocol):
    """What the watch needs of the coordinator."""

    def ask(self, limit: float, are_on_their_way: bool) -> dict[str, Progress | None] | None: ...

    def take_heard(self) -> set[str]: ...

    def wait_for_end(self, timeout: float) -> bool: ...

    def give_up(self, worker: str, reason: str, is_lost: bool) -> None: ...


class StallWatch:
    """On the chief, looks after the others while it waits; ends the run where it can never go on.

    While it waits for the others to come to their first step, whoever imports, reads or traces may take its time, and
    one alone whose process is stopped counts as one that does not answer.

    Where it may go on, since a worker is busy outside of the step, that is told in the log, after twice the time each
    time.

    Args:
        coordinator: of the run.
        chief: name of this worker.
        progress: what this worker does.
        limits: of time.
    """

    def __init__(self, coordinator: AsksWorkers, chief: str, progress: Callable[[], Progress], limits: Limits) -> None:
        self._coordinator, self._chief, self._progress, self._limits = coordinator, chief, progress, limits
        self._begin()
        threading.Thread(target=self._watch, name="autodist-stalls", daemon=True).start()

    def _begin(self) -> None:
        """The chief has not waited for long."""
        self._tells_after = self._limits.stall
        self._before: tuple[float, Progress, Mapping[str, Progress | None]] | None = None
        self._stopwatch = Stopwatch(self._limits.look_interval)
        self._answered: dict[str, float] = {}
        self._heard: dict[str, float] = {}

    def _watch(self) -> None:
        interval = self._limits.look_interval
        while not self._coordinator.wait_for_end(interval):
            mine = self._progress()
            if mine.doing == Doing.ELSE or mine.since < interval:
                self._begin()
            else:
                self._look()

    def _look(self) -> None:
        looked, mine = time.monotonic(), self._progress()
        asked, is_joining = self._stopwatch.read(), mine.doing == Doing.JOINING
        answers = self._coordinator.ask(self._limits.look_interval / 2, is_joining)
        if answers is None:
            return
        answered, heard = self._stopwatch.read(), self._coordinator.take_heard()
        for name, answer in answers.items():
            self._answered[name] = self._answered.get(name, asked) if answer is None else answered
            self._heard[name] = answered if name in heard else self._heard.get(name, asked)
        before, self._before = self._before, (looked, mine, answers)
        if before is None:
            return
        between = time.monotonic() - before[0]
        chief = Seen(self._chief, before[1], self._progress(), between)
        others = {
            name: Seen(
                name, before[2][name], now, between, answered - self._answered[name], answered - self._heard[name]
            )
            for name, now in answers.items()
        }
        stall = find_stall(chief, others, self._limits)
        if stall is not None:
            self._coordinator.give_up(stall.worker, stall.reason, stall.is_lost)
        elif chief.since >= self._tells_after:
            self._tells_after = 2 * chief.since
            self._tell(chief, others)

    def _tell(self, chief: Seen, others: Mapping[str, Seen]) -> None:
        late = [f"{name} (for {seen.since:.0f} s)" for name, seen in others.items() if _is_elsewhere(seen)]
        if late:
            what = "the end of its script" if chief.is_done else "a step" if chief.has_joined else "its first step"
            _log.warning(
                "%s has waited %.0f s, in %s, for what is outside of any step: %s.",
                chief.name, chief.since, what, ", ".join(late),
            )  # fmt: skip


def _is_elsewhere(seen: Seen) -> bool:
    return seen.now is not None and seen.now.doing == Doing.ELSE
