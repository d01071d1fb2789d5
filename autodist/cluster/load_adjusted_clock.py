"""How long something was waited for, counted in what this machine could have done in that time."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

LOOK_INTERVAL = 0.5
"""Seconds between two looks at a `Stopwatch`, about."""

# Where the processors are shared by more than this many times as many processes, seconds are not stretched further.
_MOST_A_PROCESSOR = 10


def processor_share() -> float:
    """The part of a processor that one more process gets here: 1 where no more run than there are processors."""
    try:
        running = int(Path("/proc/loadavg").read_text().split()[3].split("/")[0])
    except (OSError, ValueError, IndexError):
        return 1.0  # not told here
    a_processor = running / (os.cpu_count() or 1)
    return 1 / min(max(1.0, a_processor), _MOST_A_PROCESSOR)


class Stopwatch:
    """Counts seconds in which something could have happened.

    A second of the clock counts as less where processes have to share processors; and what this process did not live to
    see, since it was suspended, does not count.

    Args:
        look_interval: seconds between two looks. One that comes much later says that this process did not run.
        share: of a processor, as `processor_share` tells it.
        clock: that tells the seconds.
    """

    def __init__(
        self,
        look_interval: float = LOOK_INTERVAL,
        share: Callable[[], float] = processor_share,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._look_interval, self._share, self._clock = look_interval, share, clock
        self._looked = clock()
        self._counted = 0.0

    def read(self) -> float:
        """Seconds counted so far; look at it every `look_interval` seconds or more often, from one thread."""
        now = self._clock()
        if now - self._looked >= self._look_interval / 5:
            self._counted += min(now - self._looked, 2 * self._look_interval) * self._share()
            self._looked = now
        return self._counted


def wait_for(changed: threading.Condition, predicate: Callable[[], object], limit: float) -> bool:
    """As `changed.wait_for(predicate, limit)`, for what takes work: `limit` is in seconds of a `Stopwatch`."""
    stopwatch = Stopwatch()
    while not predicate():
        if stopwatch.read() >= limit:
            return False
        changed.wait(min(LOOK_INTERVAL, limit))
    return True
