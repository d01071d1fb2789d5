"""scripts/plots.py: the pictures and tables in docs/ match the data in docs/."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import plots
import pytest
from plotting.lines import Line, lines_of

ROOT = Path(__file__).resolve().parents[3]
PICTURES = plots.pictures()


def results(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((ROOT / "docs" / "data" / name).read_text())["results"]
    return found


def rows(page: str) -> list[list[str]]:
    """The rows of all tables of a page."""
    lines = re.findall(r"^\| (.*) \|$", (ROOT / page).read_text(), re.MULTILINE)
    return [[cell.strip(" `") for cell in line.split("|")] for line in lines]


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_what_is_made_of_the_data(name: str) -> None:
    assert (ROOT / "docs" / "pictures" / name).read_text() == PICTURES[name], "python scripts/plots.py"


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_needs_nothing_from_elsewhere_and_is_read_in_the_dark(name: str) -> None:
    (title,) = ElementTree.fromstring(PICTURES[name]).findall("{http://www.w3.org/2000/svg}title")
    assert title.text
    assert "prefers-color-scheme: dark" in PICTURES[name]
    assert set(re.findall(r"https?://[^\"]+", PICTURES[name])) == {"http://www.w3.org/2000/svg"}


def test_names_at_the_ends_of_lines_stand_apart() -> None:
    same = ((2.0, 10.0), (4.0, 20.0))
    drawn = ElementTree.fromstring(lines_of("t", "x", "y", [Line("a", same), Line("b", same), Line("c", same)]))
    places = [float(e.attrib["y"]) for e in drawn.iter("{http://www.w3.org/2000/svg}text") if e.text in list("abc")]
    assert [after - before for before, after in pairwise(places)] == [15, 15]


@pytest.mark.parametrize("page", ["README.md", "docs/index.md", "docs/speed.md"])
def test_the_ratios_of_a_page_are_those_of_the_data(page: str) -> None:
    told: dict[str, list[float]] = {}
    for peer in ("MirroredStrategy", "MultiWorkerMirroredStrategy", "ParameterServerStrategy"):
        (row,) = [cells for cells in rows(page) if re.search(rf"\b{peer}\b", cells[0])]
        told[peer] = [float(cell) for cell in row[1:] if cell]
    for group, peer in plots.PEERS.items():
        if peer in told:
            known = [r["ratio"] for r in results("speed.json") if r["group"] == group]
            without_adagrad = [
                r["ratio"] for r in results("speed.json") if r["group"] == group and "adagrad" not in r["what"]
            ]
            assert told[peer] in (known, without_adagrad), peer


@pytest.mark.parametrize(("page", "model"), [("docs/speed.md", "resnet50"), ("docs/speed.md", "embedding")])
def test_the_counts_of_a_page_are_those_of_the_data(page: str, model: str) -> None:
    text = (ROOT / page).read_text()
    part = text[text.index(f"scale-{model}.svg") :].split("\n## ")[0]
    told = [
        line.strip("| ").replace("`", "").split(" | ") for line in part.splitlines() if line.startswith(("| `", "| H"))
    ]
    found = {r["what"]: r["numbers"] for r in results("paper.json")}
    assert len(told) > 8
    for builder, workers, megabytes, messages, milliseconds, held in told:
        numbers = found[f"{builder}, {model} on {workers} workers"]
        shown = (f"{numbers['bytes'] / 1e6:.1f}", f"{numbers['messages']}", f"{numbers['held'] / 1e6:.0f}")
        assert (megabytes, messages, held) == shown
        assert float(milliseconds) == pytest.approx(numbers["milliseconds"], rel=0.01, abs=0.05)


def test_the_costs_of_strategies_are_those_of_the_data() -> None:
    found = {r["what"]: r["numbers"] for r in results("paper.json")}
    told = [row for row in rows("docs/strategies.md") if len(row) == 5 and row[2].replace(".", "").isdigit()]
    assert len(told) == 8
    model = ""
    for step, builder, *costs in told:
        model = {"R": "resnet50", "a": "embedding"}.get(step[:1], model)
        numbers = found[f"{builder}, {model} on 16 workers"]
        shown = [f"{numbers['bytes'] / 1e6:.1f}", f"{numbers['messages']}", f"{numbers['held'] / 1e6:.0f}"]
        assert costs == shown
