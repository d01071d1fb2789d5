"""PartialCount: a sum of numbers, some of them unknown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class PartialCount:
    """A sum with a lower bound.

    Attributes:
        count: sum of the known numbers.
        is_least: True if some numbers are unknown, so that `count` is a lower bound.
    """

    count: int = 0
    is_least: bool = False

    @classmethod
    def of(cls, numbers: Iterable[int | None]) -> PartialCount:
        """Returns the sum of numbers; None stands for an unknown number."""
        values = list(numbers)
        return cls(sum(one for one in values if one is not None), None in values)

    @property
    def known(self) -> int | None:
        """The count; None if no number is known."""
        return None if self.is_least and not self.count else self.count

    def __add__(self, other: PartialCount) -> PartialCount:
        return PartialCount(self.count + other.count, self.is_least or other.is_least)

    def __mul__(self, times: int) -> PartialCount:
        return PartialCount(self.count * times, self.is_least)


def saved_by_recomputation(freed: Sequence[PartialCount]) -> PartialCount:
    """Returns the bytes that recomputing blocks saves in total, from the bytes that each block frees.

    One block's activations exist at a time in the backward pass, so the largest block saves nothing.
    """
    total = sum(freed, PartialCount())
    return PartialCount(total.count - max((one.count for one in freed), default=0), total.is_least)
