"""Selects the steps that all workers trace, so that tracing takes a small, fixed fraction of the time."""

from __future__ import annotations

import collections
import math
import statistics
import time
from collections.abc import Callable

FRACTION = 1 / 1000
"""Fraction of the chief's time that tracing may take, without the first trace of each step, which prepares later ones.

The chief measures its own step; the analysis on the other workers delays the next one, which costs about as much again
or more, so the fraction is small."""

FIRST = 10
"""Runs before the first trace: TensorFlow has placed the step and allocated its memory by then."""

LEAD = 10
"""Steps between the chief's message and the step that it selects: the message has arrived by then."""

LEAST = 0.01
"""Seconds that a trace costs at least, unless steps are shorter: on a busy machine, a traced step may look faster."""

_COSTS = 20
"""Latest traces whose mean cost counts."""

TURN_LIMIT = 50
"""Steps after which the next step is traced instead of the one whose turn it is, which the script may call no more."""


class TraceSchedule:
    """The steps to trace on one worker. The chief selects them; if there are several names, they take turns.

    Args:
        step: number of training steps so far.
        announce: on the chief, sends the number of the next step to trace to the other workers, which pass it to
            `postpone`; None on these.
        now: a clock, in seconds.
    """

    def __init__(
        self, step: int, announce: Callable[[int], None] | None = None, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._from, self._announce, self._now = step + FIRST, announce, now
        self._traced_at: dict[str, int] = {}
        self._since, self._since_step = now(), step
        self._costs: collections.deque[float] = collections.deque(maxlen=_COSTS)

    def is_due(self, name: str, step: int) -> bool:
        """Returns True if the run of a step is to be traced that `step` runs precede."""
        last = self._traced_at.setdefault(name, -1)
        is_its_turn = last == min(self._traced_at.values()) or step >= self._from + TURN_LIMIT
        return step >= self._from and is_its_turn

    def traced(self, name: str, step: int, cost: float) -> None:
        """Records that the run that ended as number `step` was traced, and took so many seconds more than others."""
        is_first, self._traced_at[name] = self._traced_at[name] < 0, step
        if self._announce is None:
            if self._from < step:  # otherwise the chief was faster, and its message has arrived
                self._from = step + TURN_LIMIT
            return
        took = (self._now() - self._since) / max(1, step - self._since_step)
        self._since, self._since_step = self._now(), step
        gap = LEAD
        if not is_first:
            self._costs.append(max(cost, min(took, LEAST)))
            gap = max(LEAD, math.ceil(statistics.fmean(self._costs) / FRACTION / max(took, 1e-6)))
        self._from = step + gap
        self._announce(self._from)

    def postpone(self, step: int) -> None:
        """Sets the next step to trace."""
        self._from = step
