"""Timeout for a connection on which the other end sends heartbeats; a cut link does not close a connection."""

from __future__ import annotations

import time
from collections.abc import Callable

_HEARTBEAT_INTERVAL = 1.0


def heartbeat_interval(limit: float) -> float:
    """Returns the seconds between two heartbeats for a timeout of `limit` seconds."""
    return min(_HEARTBEAT_INTERVAL, limit / 5)


class HeartbeatTimeout:
    """Counts the seconds since the last message, without those in which this process did not run.

    After a suspension of the machine, or seconds without a processor, messages wait to be read. The other end may be
    alive then.

    Args:
        limit: seconds without a message after which the other end counts as gone.
        grace: seconds to add to the limit until the first message.
        clock: returns the current time in seconds.

    Attributes:
        limit: the timeout in seconds.
        poll_interval: seconds between two calls of `has_expired`.
    """

    def __init__(self, limit: float, grace: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit = limit
        self.poll_interval = heartbeat_interval(limit) / 2
        # If calls are further apart than this, the process did not run in between.
        self._longest_interval = heartbeat_interval(limit)
        self._clock = clock
        self._last_call = clock()
        self._awake = 0.0
        self._last_message = grace

    def restart(self) -> None:
        """Restarts the timeout: a message arrived, or this end does not read at the moment. Thread-safe."""
        self._last_message = self._awake

    def has_expired(self) -> bool:
        """Returns True if the other end counts as gone; call it every `poll_interval` seconds from one thread."""
        now = self._clock()
        self._awake += min(now - self._last_call, self._longest_interval)
        self._last_call = now
        return self._awake - self._last_message > self.limit
