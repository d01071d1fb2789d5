"""Common parts of all plots: an SVG page, its colours in light and dark, and the functions that draw on it."""

from __future__ import annotations

from xml.etree import ElementTree

# Visible in light and dark; labels distinguish them without colour.
COLOURS = ("#3b76c4", "#d1701c", "#2f9661", "#b0489a", "#8a7a10", "#7a6bd0")

_STYLE = """
text { font: 13px system-ui, sans-serif; fill: #333; }
.title { font-weight: 600; } .small { font-size: 12px; } .axis { stroke: #8888; } .grid { stroke: #8883; }
.mark { stroke: #888; stroke-dasharray: 4 3; } .end { text-anchor: end; } .middle { text-anchor: middle; }
.back { fill: #fff; }
@media (prefers-color-scheme: dark) { text { fill: #ccc; } .back { fill: #1e2129; } }
"""


class Page:
    """An SVG file under construction; positions are in its own pixels.

    Args:
        width: the width of the page.
        height: the height of the page.
        title: description of the picture, also for screen readers.
    """

    def __init__(self, width: int, height: int, title: str) -> None:
        self._root = ElementTree.Element(
            "svg",
            {
                "xmlns": "http://www.w3.org/2000/svg",
                "viewBox": f"0 0 {width} {height}",
                "width": str(width),
                "role": "img",
            },
        )
        self._add("title").text = title
        self._add("style").text = _STYLE
        self._add("rect", {"class": "back", "width": str(width), "height": str(height), "rx": "6"})
        self.text(16, 26, title, "title")

    def text(self, x: float, y: float, text: str, kind: str = "", colour: str = "") -> None:
        attributes = {"x": _number(x), "y": _number(y)} | ({"class": kind} if kind else {})
        self._add("text", attributes | ({"style": f"fill: {colour}"} if colour else {})).text = text

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str) -> None:
        ends = {"x1": x1, "y1": y1, "x2": x2, "y2": y2}
        self._add("line", {"class": kind} | {name: _number(end) for name, end in ends.items()})

    def bar(self, x: float, y: float, width: float, height: float, colour: str) -> None:
        sides = {"x": x, "y": y, "width": width, "height": height}
        self._add("rect", {"fill": colour} | {name: _number(side) for name, side in sides.items()})

    def path(self, points: list[tuple[float, float]], colour: str) -> None:
        corners = " ".join(f"{_number(x)},{_number(y)}" for x, y in points)
        self._add("polyline", {"points": corners, "fill": "none", "stroke": colour, "stroke-width": "2"})
        for x, y in points:
            self._add("circle", {"cx": _number(x), "cy": _number(y), "r": "3", "fill": colour})

    def to_text(self) -> str:
        """Returns the content of the file."""
        ElementTree.indent(self._root)
        return ElementTree.tostring(self._root, encoding="unicode") + "\n"

    def _add(self, tag: str, attributes: dict[str, str] | None = None) -> ElementTree.Element:
        return ElementTree.SubElement(self._root, tag, attributes or {})


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
