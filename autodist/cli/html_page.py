"""Builds a page of HTML with tables and plots; a browser loads nothing but the page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from xml.etree import ElementTree

_STYLE = """
:root { color-scheme: light dark; --bar: #3b76c4; --line: #8886; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; } h3 { font-size: 1rem; }
table { border-collapse: collapse; width: 100%; font-size: 13px; }
th, td { border-bottom: 1px solid var(--line); padding: .3rem .6rem; text-align: left; vertical-align: top; }
.number { text-align: right; font-variant-numeric: tabular-nums; }
.wide { overflow-x: auto; }
pre { font: 12px/1.2 ui-monospace, monospace; overflow-x: auto; }
svg { max-width: 100%; height: auto; } svg text { font: 12px system-ui, sans-serif; fill: currentColor; }
svg rect { fill: var(--bar); } svg polyline { fill: none; stroke: var(--bar); stroke-width: 1.5; }
svg line { stroke: var(--line); } svg .dashed { stroke: currentColor; stroke-dasharray: 6 4; }
svg .part0 { fill: #3b76c4; } svg .part1 { fill: #d9822b; } svg .part2 { fill: #8f5fbf; }
svg .part3 { fill: #9aa3ad; } svg .part4 { fill: #5aa469; }
"""
_BAR, _GAP, _NAME, _LENGTH, _VALUE = 16, 6, 260, 420, 120
_WIDTH, _HEIGHT, _LEFT, _BELOW, _ABOVE = 800, 200, 80, 24, 10


def begin_page(title: str) -> tuple[ElementTree.Element, ElementTree.Element]:
    """Returns a page with a title and a heading, and its body."""
    html = ElementTree.Element("html", lang="en")
    head = add(html, "head")
    add(head, "meta", charset="utf-8")
    add(head, "meta", name="viewport", content="width=device-width, initial-scale=1")
    add(head, "title", title)
    add(head, "style", _STYLE)
    body = add(html, "body")
    add(body, "h1", title)
    return html, body


def text_of(html: ElementTree.Element) -> str:
    """Returns a page as text."""
    return "<!DOCTYPE html>\n" + ElementTree.tostring(html, encoding="unicode", method="html") + "\n"


def add(parent: ElementTree.Element, tag: str, text: str = "", **attributes: str) -> ElementTree.Element:
    """Adds an element; its text is escaped."""
    element = ElementTree.SubElement(parent, tag, attributes)
    element.text = text or None
    return element


def add_table(
    parent: ElementTree.Element, heads: Sequence[str], rows: Sequence[Sequence[str]], first_number: int
) -> None:
    """Adds a table; the columns from `first_number` on hold numbers."""
    table = add(add(parent, "div", **{"class": "wide"}), "table")
    for tag, cells in [("th", heads), *(("td", row) for row in rows)]:
        line = add(table, "tr")
        for position, cell in enumerate(cells):
            add(line, tag, cell, **({"class": "number"} if position >= first_number else {}))


def add_bars(
    parent: ElementTree.Element,
    bars: Sequence[tuple[str, Sequence[float]]],
    readable: Callable[[float], str],
    parts: Sequence[str] = (),
) -> None:
    """Adds a bar for each name, in proportion to its values, which follow one another.

    Args:
        parent: the element to add to.
        bars: the names, and the values of the bar's parts.
        readable: formats a value.
        parts: the names of the parts, which get a colour each and stand below; (): all bars have one part.
    """
    height = (len(bars) + bool(parts)) * (_BAR + _GAP)
    svg = _add_svg(parent, _NAME + _LENGTH + _VALUE, height)
    most = max(sum(values) for _, values in bars) or 1
    for row, (name, values) in enumerate(bars):
        y, x = row * (_BAR + _GAP), float(_NAME)
        _add_label(svg, _short(name), _NAME - 8, y + _BAR - 4, anchor="end")
        for number, value in enumerate(values):
            length = value * _LENGTH / most
            bar = _add_rect(svg, x, y, length, number if parts else None)
            add(bar, "title", f"{name}{f', {parts[number]}' if parts else ''}: {readable(value)}")
            x += length
        _add_label(svg, readable(sum(values)), x + 8, y + _BAR - 4)
    at = float(_NAME)
    for number, part in enumerate(parts):
        y = len(bars) * (_BAR + _GAP)
        _add_rect(svg, at, y, 12, number)
        _add_label(svg, part, at + 16, y + _BAR - 4)
        at += 32 + 7 * len(part)


def add_plot(
    parent: ElementTree.Element,
    series: Sequence[Sequence[tuple[float, float]]],
    readable: Callable[[float], str],
    level: tuple[str, float] | None = None,
) -> None:
    """Adds a plot of values over step numbers, both from 0.

    Args:
        parent: the element to add to.
        series: lines of points: a step number and a value; at least one point.
        readable: formats a value.
        level: the name and the height of a dashed line; None: there is none.
    """
    points = [point for line in series for point in line]
    right = max(step for step, _ in points) or 1
    top = 1.05 * max([value for _, value in points] + ([level[1]] if level else [])) or 1
    svg = _add_svg(parent, _LEFT + _WIDTH, _HEIGHT + _BELOW + _ABOVE)

    def place(step: float, value: float) -> tuple[float, float]:
        return _LEFT + step * (_WIDTH - 20) / right, _ABOVE + _HEIGHT * (1 - value / top)

    for share in (0.0, 0.5, 1.0):
        (x, y), (end, _) = place(0, share * top), place(right, 0)
        add(svg, "line", x1=f"{x}", x2=f"{end:.1f}", y1=f"{y:.1f}", y2=f"{y:.1f}")
        _add_label(svg, readable(share * top), _LEFT - 8, y + 4, anchor="end")
        _add_label(svg, f"{share * right:.0f}", place(share * right, 0)[0], _ABOVE + _HEIGHT + 18, anchor="middle")
    for line in series:
        places = (place(*point) for point in line)
        add(svg, "polyline", points=" ".join(f"{x:.1f},{y:.1f}" for x, y in places))
    if level is not None:
        (x, y), (end, _) = place(0, level[1]), place(right, 0)
        dashed = {"class": "dashed"}
        add(svg, "line", x1=f"{x}", x2=f"{end:.1f}", y1=f"{y:.1f}", y2=f"{y:.1f}", **dashed)
        _add_label(svg, f"{level[0]} {readable(level[1])}", end, y - 4, anchor="end")


def _add_svg(parent: ElementTree.Element, width: int, height: int) -> ElementTree.Element:
    size = {"width": str(width), "height": str(height)}
    box = f"0 0 {width} {height}"
    return add(parent, "svg", **size, viewBox=box, role="img", xmlns="http://www.w3.org/2000/svg")


def _add_label(svg: ElementTree.Element, text: str, x: float, y: float, anchor: str = "start") -> None:
    add(svg, "text", text, x=f"{x:.1f}", y=f"{y:.1f}", **{"text-anchor": anchor})


def _add_rect(svg: ElementTree.Element, x: float, y: float, length: float, part: int | None) -> ElementTree.Element:
    style = {} if part is None else {"class": f"part{part}"}
    return add(svg, "rect", x=f"{x:.1f}", y=f"{y:.1f}", width=f"{length:.1f}", height=str(_BAR), **style)


def _short(name: str) -> str:
    return name if len(name) <= 40 else f"{name[:18]} … {name[-18:]}"
