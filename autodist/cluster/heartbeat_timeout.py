"""How long nothing was heard from the other end of a connection, which a cut link does not end by itself."""

from __future__ import annotations

import time
from collections.abc import Callable

_BEAT_INTERVAL = 1.0


def beat_interval(limit: float) -> float:
    """Seconds between two heartbeats, where silence of `limit` seconds counts as the end."""
    return min(_BEAT_INTERVAL, limit / 5)


class HeartbeatTimeout:
    """Counts the time in which something could have been heard and nothing was.

    What this process did not live to see does not count: where a machine was suspended, or got no processor for
    seconds, messages wait to be read when it goes on, and the other end may be alive and well.

    Args:
        limit: seconds of silence after which the other end counts as gone.
        patience: seconds that are allowed for at first, beyond the limit.
        clock: that tells the seconds.

    Attributes:
        limit: as given.
        look_interval: seconds between two calls of `is_too_long`.
    """

    def __init__(self, limit: float, patience: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit = limit
        self.look_interval = beat_interval(limit) / 2
        # A look that comes later than this says that this process did not run in between, or hardly.
        self._late = beat_interval(limit)
        self._clock = clock
        self._looked = clock()
        self._awake = 0.0
        self._heard = patience

    def heard(self) -> None:
        """Notes that something was heard, or that this end does not listen; from any thread."""
        self._heard = self._awake

    def is_too_long(self) -> bool:
        """Whether the other end counts as gone; asked every `look_interval` seconds, from one thread."""
        now = self._clock()
        self._awake += min(now - self._looked, self._late)
        self._looked = now
        return self._awake - self._heard > self.limit
