"""Sets of times, as sorted lists of (start, end) intervals that do not overlap."""

from __future__ import annotations

import bisect
from collections.abc import Iterable

Intervals = list[tuple[float, float]]


def union(stretches: Iterable[tuple[float, float]]) -> Intervals:
    """Returns the union of intervals.

    >>> union([(3, 4), (0, 2), (1, 2.5), (5, 5)])
    [(0, 2.5), (3, 4)]
    """
    found: Intervals = []
    for start, end in sorted(stretches):
        if end <= start:
            continue
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def minus(whole: Intervals, taken: Intervals) -> Intervals:
    """Returns `whole` without `taken`.

    >>> minus([(0, 10), (20, 30)], [(2, 3), (8, 22), (29, 40)])
    [(0, 2), (3, 8), (22, 29)]
    """
    found: Intervals = []
    rest = iter(taken)
    hole = next(rest, None)
    for start, end in whole:
        free = start
        while hole is not None and hole[1] <= free:
            hole = next(rest, None)
        while hole is not None and hole[0] < end:
            if hole[0] > free:
                found.append((free, hole[0]))
            free = max(free, hole[1])
            if hole[1] >= end:
                break
            hole = next(rest, None)
        if free < end:
            found.append((free, end))
    return found


def overlap(one: Intervals, other: Intervals) -> Intervals:
    """Returns the intersection of two sets.

    >>> overlap([(0, 10), (20, 30)], [(5, 25)])
    [(5, 10), (20, 25)]
    """
    return minus(one, minus(one, other))


def within(whole: Intervals, begin: float, end: float) -> Intervals:
    """Returns the part of a set between two times.

    >>> within([(0, 2), (3, 9)], 1, 4)
    [(1, 2), (3, 4)]
    """
    return [(max(start, begin), min(stop, end)) for start, stop in whole if stop > begin and start < end]


def length(stretches: Intervals) -> float:
    """Returns the total length."""
    return sum(end - start for start, end in stretches)


def end_of_stretch(stretches: Intervals, moment: float) -> float | None:
    """Returns the end of the interval that contains a time; None if there is none.

    >>> end_of_stretch([(0, 2), (3, 9)], 4), end_of_stretch([(0, 2), (3, 9)], 2)
    (9, None)
    """
    position = bisect.bisect_right(stretches, (moment, float("inf"))) - 1
    return stretches[position][1] if position >= 0 and moment < stretches[position][1] else None
