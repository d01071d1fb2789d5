"""How far this process's clock is ahead of the chief's, which machines' clocks never agree on."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

_ASKED = 8
"""The answer that came soonest says most."""


@dataclass(frozen=True)
class ClockOffset:
    """How far a clock is ahead of another one, in seconds.

    Attributes:
        ahead: how far it is ahead.
        uncertainty: it may be so much more or less.
    """

    ahead: float
    uncertainty: float

    @staticmethod
    def of(asked: float, told: float, heard: float) -> ClockOffset:
        """By NTP's formula: the other clock is taken to have been read halfway between question and answer.

        >>> ClockOffset.of(asked=10.0, told=12.5, heard=11.0)
        ClockOffset(ahead=2.0, uncertainty=0.5)
        """
        return ClockOffset(told - (asked + heard) / 2, abs(heard - asked) / 2)


def against(tell: Callable[[], float], now: Callable[[], float] = time.time) -> ClockOffset:
    """This process's clock against the one that `tell` asks. In seconds since 1970.

    Args:
        tell: asks the other one.
        now: this process's.
    """

    def once() -> ClockOffset:
        asked, told = now(), tell()
        return ClockOffset.of(asked, told, now())

    theirs = min((once() for _ in range(_ASKED)), key=lambda clock: clock.uncertainty)
    return ClockOffset(-theirs.ahead, theirs.uncertainty)
