#!/usr/bin/env python3
"""Writes the feature table of docs/features.md: each feature by front end, as the marks of tests list it.

    python scripts/features.py            # writes the table
    python scripts/features.py --check    # exits with status 1 if the table is out of date

A test that shows a feature of a front end, or its refusal, has a mark:

    @pytest.mark.feature("fit", "data: ragged tensors")
    @pytest.mark.feature("session", "data: ragged tensors", refused="CaptureError")

The text before the colon is the feature's group in the table. Test files are read, not imported.
"""

from __future__ import annotations

import argparse
import ast
import pathlib
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "features.md"
BEGIN, END = "<!-- features: made by scripts/features.py -->\n", "<!-- end of features -->\n"

FRONTS = {"fit": "`fit`", "function": "`@ad.function`", "session": "session"}
GROUPS = ("data", "model", "loss", "step", "optimizer", "precision", "evaluation", "fetches", "callbacks", "values")
NOT_COVERED = "–"


@dataclass(frozen=True)
class Mark:
    """A test's statement about a feature.

    Attributes:
        front: one of `FRONTS`.
        feature: "group: name".
        refused: name of the error that the front end raises for it; None if it works.
        place: position of the mark, for messages.
    """

    front: str
    feature: str
    refused: str | None = None
    place: str = ""

    def __post_init__(self) -> None:
        if self.front not in FRONTS:
            raise ValueError(f"{self.place}: {self.front!r} is not a front end; use one of {', '.join(FRONTS)}.")
        if self.group not in GROUPS or not self.name:
            raise ValueError(f"{self.place}: {self.feature!r} is not 'group: name', of the groups {', '.join(GROUPS)}.")

    @property
    def group(self) -> str:
        return self.feature.partition(": ")[0]

    @property
    def name(self) -> str:
        return self.feature.partition(": ")[2]

    @property
    def cell(self) -> str:
        return f"`{self.refused}`" if self.refused else "yes"


def marks_in(text: str, file: str) -> Iterator[tuple[Mark, ast.stmt]]:
    """Yields the marks of a test file, each with its statement: a test, or a list of cases."""
    for statement in ast.parse(text).body:
        for node in ast.walk(statement):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "feature"  # first, since the other checks are slow
                and ast.unparse(node.func) == "pytest.mark.feature"
            ):
                given = [ast.literal_eval(value) for value in node.args]
                named = {keyword.arg or "**": ast.literal_eval(keyword.value) for keyword in node.keywords}
                yield Mark(*given, **named, place=f"{file}:{node.lineno}"), statement


def all_marks() -> list[tuple[Mark, ast.stmt]]:
    """Returns the marks of all test files."""
    found = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text = path.read_text()
        if "mark.feature(" in text:
            found += list(marks_in(text, str(path.relative_to(ROOT))))
    return found


def table_of(marks: Iterable[Mark]) -> str:
    """Returns the table in Markdown. Raises ValueError if two tests contradict each other on a front end."""
    marks_of: dict[tuple[str, str], dict[str, Mark]] = {}
    for mark in marks:
        earlier = marks_of.setdefault((mark.group, mark.name), {}).setdefault(mark.front, mark)
        if earlier.refused != mark.refused:
            raise ValueError(
                f"{mark.feature}, {mark.front}: {earlier.cell} at {earlier.place}, {mark.cell} at {mark.place}."
            )
    lines = [f"| | | {' | '.join(FRONTS.values())} |", f"|{'---|' * (2 + len(FRONTS))}"]
    before = None
    for group, name in sorted(marks_of, key=_order):
        cells = [found.cell if (found := marks_of[group, name].get(front)) else NOT_COVERED for front in FRONTS]
        lines.append(f"| {group if group != before else ''} | {name} | {' | '.join(cells)} |")
        before = group
    return "\n".join(lines) + "\n"


def _order(feature: tuple[str, str]) -> tuple[int, str]:
    group, name = feature
    return GROUPS.index(group), name.replace("`", "").casefold()


def with_table(text: str, table: str) -> str:
    """Returns the page with the table between its two comments."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{PAGE.name} needs the lines {BEGIN.strip()} and {END.strip()} around the table.")
    return f"{before}{begin}\n{table}\n{end}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with status 1 if the table is out of date"
    )
    check = parser.parse_args().check
    text = PAGE.read_text()
    made = with_table(text, table_of(mark for mark, _ in all_marks()))
    if check and made != text:
        print("docs/features.md's table differs from the tests' marks; run python scripts/features.py to write it.")
        return 1
    if not check:
        PAGE.write_text(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
