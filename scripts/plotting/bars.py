"""Bars in groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from plotting.page import COLOURS, Page

_WIDTH, _NAMES, _TOP, _BAR, _GAP, _HEAD = 720, 170, 44, 18, 6, 28


@dataclass(frozen=True)
class Bar:
    """One bar.

    Attributes:
        group: its heading; bars of a group are adjacent.
        name: its label.
        value: its length, not below 0.
    """

    group: str
    name: str
    value: float


def bars_of(title: str, bars: Sequence[Bar], mark: float) -> str:
    """Returns the plot as SVG, with a reference line at `mark`."""
    groups = [(group, list(members)) for group, members in groupby(bars, lambda bar: bar.group)]
    height = _TOP + len(groups) * (_HEAD + 8) + len(bars) * (_BAR + _GAP) + 12
    page = Page(_WIDTH, height, title)
    scale = (_WIDTH - _NAMES - 70) / max(mark, *(bar.value for bar in bars))
    at_mark = _NAMES + mark * scale
    page.line(at_mark, _TOP - 2, at_mark, height - 12, "mark")
    y = float(_TOP)
    for position, (group, members) in enumerate(groups):
        page.text(16, y + 16, f"against {group}", "small")
        y += _HEAD
        for bar in members:
            page.text(_NAMES - 10, y + _BAR - 5, bar.name, "end small")
            page.bar(_NAMES, y, bar.value * scale, _BAR, COLOURS[position % len(COLOURS)])
            page.text(_NAMES + bar.value * scale + 6, y + _BAR - 5, f"{bar.value:.2f}", "small")
            y += _BAR + _GAP
        y += 8
    return page.to_text()
