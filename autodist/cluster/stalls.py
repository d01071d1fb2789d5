"""Stalls: workers that wait for one another, or for one that does not answer, and would for ever."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from autodist.cluster.protocol import Doing, Progress

_log = logging.getLogger("autodist.cluster")

STALL_LIMIT = 60.0
"""Seconds in one step, or after the end of its script, from which on the chief asks what the others do."""

ANSWER_LIMIT = 60.0
"""Seconds that a worker's process has to answer. It cannot while code that holds Python's lock runs."""

DEADLOCK_LIMIT = 300.0
"""Seconds after which workers that are all within steps, and compute nothing, count as waiting for one another. A step
may wait for something else than workers, a disk far away, say."""

_LOOK_INTERVAL = 5.0
_BUSY = 0.1
"""Seconds of processor time a second; a process that only waits for messages takes less."""

SAME_STEPS = (
    "Every worker has to make the same steps: see that each has as many batches, and the same callbacks that may end "
    "the training, and that no step, pull or reduce stands where only some workers come by."
)


@dataclass(frozen=True)
class Seen:
    """One worker, looked at twice.

    Attributes:
        name: of the worker.
        before: what it did then; None if it did not answer.
        now: what it does now.
        between: seconds between the two.
    """

    name: str
    before: Progress | None
    now: Progress | None
    between: float

    @property
    def waits(self) -> bool:
        """Whether it has been in one step all the while, without computing."""
        if self.before is None or self.now is None or self.now.doing != Doing.STEPPING or self.now.since < self.between:
            return False
        return self.now.processor - self.before.processor < _BUSY * self.between

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
    """

    worker: str
    reason: str


def find_stall(chief: Seen, others: Mapping[str, Seen]) -> Stall | None:
    """Why the run can never go on, if that is certain.

    It is if a process does not answer, or if all whose scripts have not ended wait in steps and compute nothing.
    """
    for name, seen in others.items():
        if seen.now is None:
            return Stall(
                name, f"has not answered for {ANSWER_LIMIT:.0f} s: its process was stopped, or runs code that lets "
                "nothing else of it run"
            )  # fmt: skip
    everyone = [chief, *others.values()]
    waiting = [seen for seen in everyone if seen.waits]
    if not waiting or not all(seen.waits or seen.is_done for seen in everyone):
        return None
    longest = max(seen.since for seen in waiting)
    ended = [seen for seen in everyone if seen.is_done]
    if ended:
        return _missed(chief, ended, waiting) if longest >= STALL_LIMIT else None
    if longest < DEADLOCK_LIMIT:
        return None
    return Stall(
        next(iter(others)), f"and all others have waited for one another for {longest:.0f} s, in different steps. "
        + SAME_STEPS
    )  # fmt: skip


def _missed(chief: Seen, ended: list[Seen], waiting: list[Seen]) -> Stall:
    who = " and ".join(seen.name for seen in waiting) + (" waits" if len(waiting) == 1 else " wait")
    if ended == [chief]:
        return Stall(waiting[0].name, f"waits in a step for {chief.name}, whose script has ended. {SAME_STEPS}")
    first = next(seen for seen in ended if seen is not chief)
    return Stall(first.name, f"has ended its script, and {who} for it in a further step. {SAME_STEPS}")


class AsksWorkers(Protocol):
    """What the watch needs of the coordinator."""

    def ask(self, limit: float) -> dict[str, Progress | None] | None: ...

    def wait_for_end(self, timeout: float) -> bool: ...

    def give_up(self, worker: str, reason: str) -> None: ...


class StallWatch:
    """On the chief, looks after the others when it has waited for long; ends the run where it can never go on.

    Where it may go on, since a worker is busy outside of the step, that is told in the log, after twice the time each
    time.

    Args:
        coordinator: of the run.
        chief: name of this worker.
        progress: what this worker does.
    """

    def __init__(self, coordinator: AsksWorkers, chief: str, progress: Callable[[], Progress]) -> None:
        self._coordinator, self._chief, self._progress = coordinator, chief, progress
        self._tells_after = STALL_LIMIT
        threading.Thread(target=self._watch, name="autodist-stalls", daemon=True).start()

    def _watch(self) -> None:
        while not self._coordinator.wait_for_end(_LOOK_INTERVAL):
            mine = self._progress()
            if mine.doing == Doing.ELSE or mine.since < STALL_LIMIT:
                self._tells_after = STALL_LIMIT
            else:
                self._look()

    def _look(self) -> None:
        began, mine = time.monotonic(), self._progress()
        before = self._coordinator.ask(ANSWER_LIMIT)
        if before is None or self._coordinator.wait_for_end(_LOOK_INTERVAL):
            return
        now = self._coordinator.ask(ANSWER_LIMIT)
        if now is None:
            return
        between = time.monotonic() - began
        chief = Seen(self._chief, mine, self._progress(), between)
        others = {name: Seen(name, before[name], now[name], between) for name in now}
        stall = find_stall(chief, others)
        if stall is not None:
            self._coordinator.give_up(stall.worker, stall.reason)
        elif chief.since >= self._tells_after:
            self._tells_after = 2 * chief.since
            self._tell(chief, others)

    def _tell(self, chief: Seen, others: Mapping[str, Seen]) -> None:
        late = [f"{name} (for {seen.since:.0f} s)" for name, seen in others.items() if _is_elsewhere(seen)]
        if late:
            what = "the end of its script" if chief.is_done else "a step"
            _log.warning(
                "%s has waited %.0f s, in %s, for what is outside of any step: %s.",
                chief.name, chief.since, what, ", ".join(late),
            )  # fmt: skip


def _is_elsewhere(seen: Seen) -> bool:
    return seen.now is not None and seen.now.doing == Doing.ELSE
