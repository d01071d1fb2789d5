"""SIGTERM as a notice of preemption, which a scheduler may send more than once."""

from __future__ import annotations

import time

REPEATS_WITHIN = 5.0
"""Seconds after the first SIGTERM in which further ones belong to it.

SLURM sends a task SIGTERM itself and, if the batch script runs `srun`, again through that `srun`.
"""


class PreemptionNotice:
    """The first SIGTERM to a process of a run that saves then."""

    def __init__(self) -> None:
        self._came_at: float | None = None

    def includes_this(self) -> bool:
        """Returns True for the first SIGTERM and its repeats; False for a later one, which ends the process."""
        now = time.monotonic()
        if self._came_at is None:
            self._came_at = now
            return True
        return now - self._came_at < REPEATS_WITHIN
