"""Line plots with two logarithmic axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from plotting.page import COLOURS, Page

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 720, 400, 60, 150, 50, 48
_APART = 15
"""Smallest distance of two labels at the right."""


@dataclass(frozen=True)
class Line:
    """One line.

    Attributes:
        name: the text at its right end.
        points: x and y, both above 0, by x.
    """

    name: str
    points: tuple[tuple[float, float], ...]


def lines_of(title: str, x_name: str, y_name: str, lines: Sequence[Line]) -> str:
    """Returns the plot as SVG."""
    page = Page(_WIDTH, _HEIGHT, title)
    xs = sorted({x for line in lines for x, _ in line.points})
    ys = [y for line in lines for _, y in line.points]
    low, high = math.floor(math.log10(min(ys))), math.ceil(math.log10(max(ys)))

    def across(x: float) -> float:
        return _LEFT + math.log(x / xs[0]) / math.log(xs[-1] / xs[0]) * (_WIDTH - _LEFT - _RIGHT)

    def down(y: float) -> float:
        return _HEIGHT - _BOTTOM - (math.log10(y) - low) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    right, bottom = across(xs[-1]), down(10.0**low)
    for power in range(low, high + 1):
        y = down(10.0**power)
        page.line(_LEFT, y, right, y, "axis" if power == low else "grid")
        page.text(_LEFT - 8, y + 4, f"{10.0**power:g}", "end small")
    for x in xs:
        page.line(across(x), bottom, across(x), bottom + 5, "axis")
        page.text(across(x), bottom + 20, f"{x:g}", "middle small")
    page.text((_LEFT + right) / 2, bottom + 38, x_name, "middle small")
    page.text(16, _TOP - 10, y_name, "small")
    ends = _apart([down(line.points[-1][1]) for line in lines])
    for position, (line, end) in enumerate(zip(lines, ends, strict=True)):
        colour = COLOURS[position % len(COLOURS)]
        page.path([(across(x), down(y)) for x, y in line.points], colour)
        page.text(right + 10, end + 4, line.name, "small", colour)
    return page.to_text()


def _apart(places: Sequence[float]) -> list[float]:
    """Returns the positions of labels for places on a line: in the same order, without overlap."""
    order = sorted(range(len(places)), key=places.__getitem__)
    found = list(places)
    for before, after in pairwise(order):
        found[after] = max(found[after], found[before] + _APART)
    return found
