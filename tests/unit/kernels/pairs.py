"""Pairs instead of products: each case once with the hardest layout, and each other layout with some of the cases."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import pytest
from _pytest.mark import ParameterSet


def pairs(cases: Collection[object], layouts: Collection[object], each: int = 1) -> list[ParameterSet]:
    """Returns values of two parameters, a case and a layout.

    The last layout combines the features of all others and takes every case. Each other layout takes `each` cases that
    no earlier layout had, since its own features do not depend on the case.

    >>> [pair.values for pair in pairs("abcd", ["1x2", "2x1", "2x2"])]
    [('a', '1x2'), ('a', '2x2'), ('b', '2x1'), ('b', '2x2'), ('c', '2x2'), ('d', '2x2')]
    """
    *others, hardest = layouts
    return [
        pytest.param(case, layout, id=f"{_name(case)}-{_name(layout)}")
        for position, case in enumerate(cases)
        for layout in (*_in_turn(position, len(cases), others, each), hardest)
    ]


def _in_turn(position: int, count: int, layouts: list[object], each: int) -> Iterator[object]:
    """Yields the layouts assigned to a case."""
    for number, layout in enumerate(layouts):
        if position in {(number + count * k // each) % count for k in range(each)}:
            yield layout


def _name(value: object) -> str:
    if isinstance(value, tuple):
        return "x".join(map(_name, value))
    return getattr(value, "__name__", str(value))
