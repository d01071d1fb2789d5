"""Synchrony: when the gradients of the workers are applied to a variable."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class SyncMode(enum.Enum):
    """When the gradients of a variable are applied."""

    SYNCHRONOUS = "synchronous"  # one update for all workers' gradients of a step; the step waits for it
    STALE = "stale"  # one update for all workers' gradients of a step; steps may run ahead of it
    ASYNCHRONOUS = "asynchronous"  # one update for each worker's gradient
    LOCAL = "local steps"  # each worker updates its own copy with its own gradient; the copies are averaged at times

    @property
    def is_alone(self) -> bool:
        """True if each update has the gradient of one worker, for its own examples."""
        return self in (SyncMode.ASYNCHRONOUS, SyncMode.LOCAL)


@dataclass(frozen=True)
class Synchrony:
    """The synchronization of a variable that one worker owns, or of which each worker updates its own copy.

    Attributes:
        mode: when gradients are applied.
        staleness: the number of steps that a worker may be ahead of the slowest; 0 with ASYNCHRONOUS: unlimited.
    """

    mode: SyncMode = SyncMode.SYNCHRONOUS
    staleness: int = 0

    @property
    def runs_ahead(self) -> bool:
        """True if steps do not wait for the other workers."""
        return self.mode is not SyncMode.SYNCHRONOUS
