"""Renders plans as an HTML page with plots. The page is one file; a browser loads nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree import ElementTree

from autodist.cli.plan_tables import WORKER_HEADS, cost, where, worker_rows
from autodist.cli.plans import PlannedStrategy, Plans, VariablePlan
from autodist.logs.formatting import readable_bytes, readable_shape
from autodist.strategies.stage_table import CUT_HEADS, STAGE_HEADS, cut_rows, stage_rows

MOST_BARS = 64
"""Number of links shown: those with the most bytes. The others are counted below."""

_STYLE = """
:root { color-scheme: light dark; --bar: #3b76c4; --line: #8886; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; } h3 { font-size: 1rem; }
table { border-collapse: collapse; width: 100%; font-size: 13px; }
th, td { border-bottom: 1px solid var(--line); padding: .3rem .6rem; text-align: left; vertical-align: top; }
.number { text-align: right; font-variant-numeric: tabular-nums; }
.wide { overflow-x: auto; }
svg { max-width: 100%; height: auto; } svg text { font: 12px system-ui, sans-serif; fill: currentColor; }
svg rect { fill: var(--bar); }
"""
_BAR, _GAP, _NAME, _LENGTH, _VALUE = 16, 6, 260, 420, 120


def page_of(plans: Plans) -> str:
    """Returns the page as HTML; names are escaped."""
    html = ElementTree.Element("html", lang="en")
    head = _add(html, "head")
    _add(head, "meta", charset="utf-8")
    _add(head, "meta", name="viewport", content="width=device-width, initial-scale=1")
    _add(head, "title", f"Plan of {plans.script}")
    _add(head, "style", _STYLE)
    body = _add(html, "body")
    _add(body, "h1", f"Plan of {plans.script}")
    _add(body, "p", "Sent and received bytes are those of gradients and variable values in one training step. A worker "
         "holds variables with the optimizer's slots. FLOPs are TensorFlow's count for a worker's part of the first "
         "batch.")  # fmt: skip
    if plans.note:
        _add(body, "p", plans.note)
    for plan in plans.plans:
        _add_plan(body, plan)
    return "<!DOCTYPE html>\n" + ElementTree.tostring(html, encoding="unicode", method="html") + "\n"


def _add_plan(body: ElementTree.Element, plan: PlannedStrategy) -> None:
    _add(body, "h2", plan.title)
    if plan.rows_are_missing:
        _add(body, "p", "The number of sparse rows that a step touches is not known; their bytes are extra.")
    if plan.sums:
        _add(body, "p", f"{plan.sums[0].upper()}{plan.sums[1:]}.")
    _add(body, "h3", "Memory held by each worker")
    _add_bars(body, [(worker.name, worker.held) for worker in plan.workers][:MOST_BARS])
    _add_more(body, len(plan.workers), "workers")
    _add(body, "h3", "Bytes per step on each link")
    links = sorted(plan.links, key=lambda link: -link.bytes)
    if links:
        _add_bars(body, [(f"{link.source} → {link.target}", link.bytes) for link in links[:MOST_BARS]])
        _add_more(body, len(links), "links, with at most as many bytes each")
    else:
        _add(body, "p", "None: there is only one worker, or only rows of unknown number are sent.")
    _add(body, "h3", "Workers")
    _add_table(body, WORKER_HEADS, worker_rows(plan), first_number=1)
    if plan.pipeline is not None:
        _add(body, "h3", "Stages")
        _add(body, "p", f"{plan.pipeline.caption}.")
        _add_table(body, STAGE_HEADS, stage_rows(plan.pipeline), first_number=2)
        _add(body, "h3", "Cross-stage transfers")
        _add_table(body, CUT_HEADS, cut_rows(plan.pipeline), first_number=1)
    _add(body, "h3", "Variables")
    heads = ["variable", "shape", "bytes", "gradient", "synchronizer", "where", "slots", "sent a step"]
    _add_table(body, heads, [_cells(variable) for variable in plan.variables], first_number=len(heads))


def _cells(v: VariablePlan) -> list[str]:
    slots = ", ".join(f"{slot.name} ({readable_bytes(slot.bytes)})" for slot in v.slots) or "none"
    return [
        v.name,
        readable_shape(v.shape),
        readable_bytes(v.bytes),
        v.gradient,
        v.synchronizer,
        where(v),
        slots,
        cost(v),
    ]


def _add_bars(parent: ElementTree.Element, bars: Sequence[tuple[str, int]]) -> None:
    """Adds a bar for each name, in proportion to its bytes."""
    height = len(bars) * (_BAR + _GAP)
    size = {"width": str(_NAME + _LENGTH + _VALUE), "height": str(height)}
    box = f"0 0 {size['width']} {size['height']}"
    svg = _add(parent, "svg", **size, viewBox=box, role="img", xmlns="http://www.w3.org/2000/svg")
    most = max(count for _, count in bars) or 1
    for position, (name, count) in enumerate(bars):
        y, length = position * (_BAR + _GAP), count * _LENGTH / most
        middle = str(y + _BAR - 4)
        _add(svg, "text", _short(name), x=str(_NAME - 8), y=middle, **{"text-anchor": "end"})
        bar = _add(svg, "rect", x=str(_NAME), y=str(y), width=f"{length:.1f}", height=str(_BAR))
        _add(bar, "title", f"{name}: {count} bytes")
        _add(svg, "text", readable_bytes(count), x=f"{_NAME + length + 8:.1f}", y=middle)


def _short(name: str) -> str:
    return name if len(name) <= 40 else f"{name[:18]} … {name[-18:]}"


def _add_more(parent: ElementTree.Element, count: int, of: str) -> None:
    if count > MOST_BARS:
        _add(parent, "p", f"and {count - MOST_BARS} more {of}")


def _add_table(
    parent: ElementTree.Element, heads: Sequence[str], rows: Sequence[Sequence[str]], first_number: int
) -> None:
    """Adds a table; the columns from `first_number` on hold numbers."""
    table = _add(_add(parent, "div", **{"class": "wide"}), "table")
    for tag, cells in [("th", heads), *(("td", row) for row in rows)]:
        line = _add(table, "tr")
        for position, cell in enumerate(cells):
            _add(line, tag, cell, **({"class": "number"} if position >= first_number else {}))


def _add(parent: ElementTree.Element, tag: str, text: str = "", **attributes: str) -> ElementTree.Element:
    element = ElementTree.SubElement(parent, tag, attributes)
    element.text = text or None
    return element
