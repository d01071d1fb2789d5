"""Synchrony: when the owner of a variable applies the gradients of the workers."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class SyncMode(enum.Enum):
    """When an owner applies the gradients of a variable."""

    SYNCHRONOUS = "synchronous"  # one update for all workers' gradients of a step; the step waits for it
    STALE = "stale"  # one update for all workers' gradients of a step; steps may run ahead of it
    ASYNCHRONOUS = "asynchronous"  # one update for each worker's gradient


@dataclass(frozen=True)
class Synchrony:
    """The synchronization of a variable that one worker owns.

    Attributes:
        mode: when gradients are applied.
        staleness: the number of steps that a worker may be ahead of the slowest; 0 with ASYNCHRONOUS: unlimited.
    """

    mode: SyncMode = SyncMode.SYNCHRONOUS
    staleness: int = 0

    @property
    def runs_ahead(self) -> bool:
        """True if steps do not wait for the update that they cause."""
        return self.mode is not SyncMode.SYNCHRONOUS
