"""Schedule: decides at which steps a run is saved; the steps are the same on all workers."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

LOOK_SECONDS = 1.0
"""Approximate interval at which the chief shares its clock and its requests with the other workers."""


def _nothing() -> None:
    """Does nothing."""


class Schedule:
    """Decides between two steps if the run is saved now; every worker calls it before the same steps.

    Step counts need no communication. The chief shares its clock and its requests (`ask`) at regular looks. Each look
    also sets the number of steps until the next one, from the duration of the last steps.

    Args:
        is_chief: True if this worker is the chief.
        share: broadcasts the chief's value to all workers; a collective call.
        every_steps: saves after this many steps; None: steps do not count.
        every_minutes: saves after this many minutes by the chief's clock; None: time does not count.
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
        self._is_requested, self._after_save = False, _nothing

    def request(self, then: Callable[[], None] = _nothing) -> None:
        """On the chief, requests a save at the next look. Safe in any thread and in a signal handler.

        Args:
            then: called after the save.
        """
        self._after_save = then  # first: `saved` calls it and may run in between
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
        """Records a save, for whatever reason."""
        self.saved_step, self._saved_at = step, self._clock()
        self._is_requested = False
        then, self._after_save = self._after_save, _nothing
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
