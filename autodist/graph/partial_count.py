"""Tally: a sum of numbers, some of which are not known."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class PartialCount:
    """A sum of what is counted.

    Attributes:
        count: of what is known.
        is_least: whether there is more, of which it is not known how much.
    """

    count: int = 0
    is_least: bool = False

    @classmethod
    def of(cls, numbers: Iterable[int | None]) -> PartialCount:
        """The sum of numbers; None: one is not known."""
        found = list(numbers)
        return cls(sum(one for one in found if one is not None), None in found)

    @property
    def known(self) -> int | None:
        """The count; None where nothing is known."""
        return None if self.is_least and not self.count else self.count

    def __add__(self, other: PartialCount) -> PartialCount:
        return PartialCount(self.count + other.count, self.is_least or other.is_least)

    def __mul__(self, times: int) -> PartialCount:
        return PartialCount(self.count * times, self.is_least)
