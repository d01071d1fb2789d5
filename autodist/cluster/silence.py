"""How long nothing was heard from the other end of a connection, which a cut link does not end by itself."""

from __future__ import annotations

import time
from collections.abc import Callable

from autodist.cluster.protocol import HEARTBEAT_INTERVAL, SILENCE_LIMIT

LOOK_INTERVAL = HEARTBEAT_INTERVAL / 2
"""Seconds between two calls of `Silence.is_too_long`."""

# A look that comes later than this says that this process did not run in between, or hardly.
_LATE = HEARTBEAT_INTERVAL


class Silence:
    """Counts the time in which something could have been heard and nothing was.

    What this process did not live to see does not count: where a machine was suspended, or got no processor for
    seconds, messages wait to be read when it goes on, and the other end may be alive and well.

    Args:
        patience: seconds of silence that are allowed for at first, beyond the usual.
        clock: that tells the seconds.
    """

    def __init__(self, patience: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._looked = clock()
        self._awake = 0.0
        self._heard = patience

    def heard(self) -> None:
        """Notes that something was heard, or that this end does not listen; from any thread."""
        self._heard = self._awake

    def is_too_long(self) -> bool:
        """Whether the other end counts as gone; asked every `LOOK_INTERVAL` seconds, from one thread."""
        now = self._clock()
        self._awake += min(now - self._looked, _LATE)
        self._looked = now
        return self._awake - self._heard > SILENCE_LIMIT
