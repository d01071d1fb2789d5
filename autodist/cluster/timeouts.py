"""Clocks for timeouts: the load-adjusted stopwatch, and the timeout of a connection with heartbeats.

The stopwatch runs slower on a loaded machine and pauses while the process is suspended.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from autodist.waits import Condition

POLL_INTERVAL = 0.5
"""Approximate seconds between two reads of a `Stopwatch`."""

# Seconds are not stretched by more than this number of processes per processor.
_MAX_LOAD = 10


def processor_share() -> float:
    """Returns the share of a processor that a process gets; 1 if at most one process per processor is running."""
    try:
        running = int(Path("/proc/loadavg").read_text().split()[3].split("/")[0])
    except (OSError, ValueError, IndexError):
        return 1.0  # not available on this system
    load = running / (os.cpu_count() or 1)
    return 1 / min(max(1.0, load), _MAX_LOAD)


class Stopwatch:
    """Counts the seconds in which other processes could make progress.

    A second counts as less than 1 if processes have to share processors. Time in which this process was suspended does
    not count.

    Args:
        poll_interval: seconds between two reads; after a much longer interval, this process counts as suspended.
        share: returns the current share of a processor, as `processor_share`.
        clock: returns the current time in seconds.
    """

    def __init__(
        self,
        poll_interval: float = POLL_INTERVAL,
        share: Callable[[], float] = processor_share,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._poll_interval, self._share, self._clock = poll_interval, share, clock
        self._last_read = clock()
        self._counted = 0.0

    def read(self) -> float:
        """Returns the seconds counted so far; call it at least every `poll_interval` seconds from one thread."""
        now = self._clock()
        if now - self._last_read >= self._poll_interval / 5:
            self._counted += min(now - self._last_read, 2 * self._poll_interval) * self._share()
            self._last_read = now
        return self._counted


def wait_for(changed: Condition, predicate: Callable[[], object], limit: float) -> bool:
    """Same as `changed.wait_for(predicate, limit)`, with `limit` in seconds of a `Stopwatch`."""
    stopwatch = Stopwatch()
    while not predicate():
        if stopwatch.read() >= limit:
            return False
        changed.wait(min(POLL_INTERVAL, limit))
    return True


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
