#!/usr/bin/env python3
"""Draws the plots of the documentation from the results of `scripts/bench.py --json`.

    python scripts/plots.py         # docs/pictures/*.svg from docs/data/*.json

Equal data make equal bytes, and a test checks that the pictures match the data. The pictures suit light and dark pages:
text has the colour of the page that the reader's system prefers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from plotting.bars import Bar, bars_of
from plotting.lines import Line, lines_of
from plotting.mesh import mesh_of_block

ROOT = Path(__file__).resolve().parent.parent
DATA, PICTURES = ROOT / "docs" / "data", ROOT / "docs" / "pictures"

PEERS = {
    "mirrored": "MirroredStrategy",
    "mwms": "MultiWorkerMirroredStrategy",
    "ps": "ParameterServerStrategy",
    "alone": "the script alone",
}


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    for name, text in pictures().items():
        (PICTURES / name).write_text(text, encoding="utf-8")


def pictures() -> dict[str, str]:
    """Returns all plots, by the names of their files."""
    paper = _results("paper.json")
    return {
        "speed.svg": _speed(_results("speed.json")),
        "links.svg": _links(_results("links.json")),
        "mesh.svg": mesh_of_block(),
        **{f"scale-{model}.svg": _scale(model, paper) for model in ("resnet50", "embedding")},
    }


def _results(name: str) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = json.loads((DATA / name).read_text(encoding="utf-8"))["results"]
    return results


def _speed(results: Sequence[dict[str, Any]]) -> str:
    bars = [
        Bar(PEERS[result["group"]], result["what"].partition(",")[0], result["ratio"])
        for result in results
        if result["group"] in PEERS
    ]
    return bars_of("A step's time as a part of the other's: shorter is faster", bars, mark=1.0)


def _links(results: Sequence[dict[str, Any]]) -> str:
    """Returns a bar for each builder, in a group for each link; the relay's own rates are left out."""
    steps = [(result["what"].split(", "), result["ratio"]) for result in results if result["limit"]]
    bars = [
        Bar(f"{PEERS['mwms']}, a link of {link}", builder, ratio)
        for (_, builder, link), ratio in sorted(steps, key=lambda step: step[0][2])
    ]
    return bars_of("A step over a slow link, as a part of the other's: shorter is faster", bars, mark=1.0)


def _scale(model: str, results: Sequence[dict[str, Any]]) -> str:
    """A line for each builder: milliseconds by workers."""
    points: dict[str, list[tuple[float, float]]] = {}
    for result in results:
        builder, _, rest = result["what"].partition(", ")
        if rest.startswith(f"{model} "):
            numbers = result["numbers"]
            points.setdefault(builder, []).append((numbers["workers"], numbers["milliseconds"]))
    lines = [Line(builder, tuple(found)) for builder, found in points.items()]
    return lines_of("Communication in a step, on paper", "workers", "ms", lines)


if __name__ == "__main__":
    main()
