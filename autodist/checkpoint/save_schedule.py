"""Schedule: at which steps a run is saved, the same ones on all workers."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

LOOK_SECONDS = 1.0
"""How often, about, the chief looks at its clock and at what it was asked for, and tells the others."""


def _nothing() -> None:
    """Nothing is to be done."""


class Schedule:
    """Decides between two steps whether what is trained is saved now; all workers ask it before the same steps.

    Counted steps need no word between workers. What the chief alone knows, its clock and `ask`, it tells at looks: at
    each it also says after how many more steps the next one is, by how long the last ones took.

    Args:
        is_chief: whether this worker is the chief.
        share: gives every worker what the chief says; all of them call it alike.
        every_steps: after which it is saved; None: not by them.
        every_minutes: likewise, by the chief's clock.
        step: how many were made before.
        clock: in seconds.

    Attributes:
        saved_step: how many steps were made when it was saved last, or when it began.
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
        self._is_asked, self._then = False, _nothing

    def ask(self, then: Callable[[], None] = _nothing) -> None:
        """On the chief: it is saved at the next look, whatever else is due. From any thread, or a signal's handler.

        Args:
            then: called when it was saved.
        """
        self._then = then  # first: `saved`, which may come in between, calls it
        self._is_asked = True

    def is_due(self, step: int) -> bool:
        """Whether it is saved now.

        Args:
            step: how many steps were made so far.
        """
        if step <= self.saved_step:
            return False
        is_due = self._every_steps is not None and step // self._every_steps > self.saved_step // self._every_steps
        if step >= self._next_look:
            is_due = self._look(step) or is_due
        return is_due

    def saved(self, step: int) -> None:
        """Notes that the run was saved, for whatever reason."""
        self.saved_step, self._saved_at = step, self._clock()
        self._is_asked = False
        then, self._then = self._then, _nothing
        then()

    def _look(self, step: int) -> bool:
        now, told = self._clock(), [False, 0]
        if self._is_chief:
            is_time = self._every_seconds is not None and now - self._saved_at >= self._every_seconds
            taken = max((now - self._looked_at) / (step - self._looked_step), 1e-9)
            told = [is_time or self._is_asked, max(1, min(2 * self._apart, int(LOOK_SECONDS / taken)))]
        is_due, self._apart = json.loads(self._share(json.dumps(told)))
        self._looked_at, self._looked_step, self._next_look = now, step, step + self._apart
        return bool(is_due)
