"""Offset between the clocks of two processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

_QUERIES = 8
"""Number of queries; the one with the shortest round trip is the most accurate."""


@dataclass(frozen=True)
class ClockOffset:
    """The offset of a clock from another one, in seconds.

    Attributes:
        ahead: seconds by which the clock is ahead.
        uncertainty: largest error of `ahead` in both directions.
    """

    ahead: float
    uncertainty: float

    @staticmethod
    def of(sent: float, remote: float, received: float) -> ClockOffset:
        """Returns the offset by NTP's formula, which assumes that the other clock was read halfway through the query.

        >>> ClockOffset.of(sent=10.0, remote=12.5, received=11.0)
        ClockOffset(ahead=2.0, uncertainty=0.5)
        """
        return ClockOffset(remote - (sent + received) / 2, abs(received - sent) / 2)


def measure_offset(query: Callable[[], float], now: Callable[[], float] = time.time) -> ClockOffset:
    """Returns the offset of another clock from that of this process.

    Args:
        query: queries the other clock, in seconds since 1970.
        now: reads this process's clock.
    """

    def once() -> ClockOffset:
        sent, remote = now(), query()
        return ClockOffset.of(sent, remote, now())

    return min((once() for _ in range(_QUERIES)), key=lambda clock: clock.uncertainty)
