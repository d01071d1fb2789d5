"""Keeper: how the owner of a variable keeps it for all workers."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class SyncMode(enum.Enum):
    """When the gradients of a variable that one worker owns are applied."""

    SYNCHRONOUS = "synchronous"  # all workers' gradients of a step are one update, for which the step waits
    STALE = "stale"  # all workers' gradients of a step are one update, and steps may run ahead of it
    ASYNCHRONOUS = "asynchronous"  # each worker's gradient is an update


@dataclass(frozen=True)
class VariablePlacement:
    """How one worker keeps a variable for all.

    Attributes:
        owner: index of the worker.
        pace: when gradients are applied.
        staleness: how many steps a worker may be ahead of the slowest; 0 with ASYNCHRONOUS: as many as it likes.
    """

    owner: int
    pace: SyncMode = SyncMode.SYNCHRONOUS
    staleness: int = 0

    @property
    def runs_ahead(self) -> bool:
        """Whether steps do not wait for the update that they bring about."""
        return self.pace is not SyncMode.SYNCHRONOUS
