"""scripts/record_run.py: the final text of a terminal, and its picture."""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.loaded_scripts import load_script

record_run = load_script("record_run")


@pytest.mark.parametrize(
    ("shown", "lines"),
    [
        ("one\r\ntwo\r\n", ["one", "two"]),
        ("10 %\r20 %\r\x1b[K100 %\r\ndone", ["100 %", "done"]),
        ("waits\r\nfor it\r\n\x1b[2Agoes on\r\nsoon", ["goes on", "soon"]),
        ("\x1b[32mgreen\x1b[0m\r\n", ["\x1b[32mgreen\x1b[0m"]),
    ],
)
def test_of_what_is_written_over_the_last_stays(shown: str, lines: list[str]) -> None:
    assert record_run.lines_at_the_end(shown) == lines


def test_a_command_sees_a_terminal_and_its_status_is_known() -> None:
    code = "import os, sys; print(os.get_terminal_size().columns, sys.stdout.isatty()); sys.exit(3)"
    assert record_run.record([sys.executable, "-c", code]) == (f"{record_run.COLUMNS} True\r\n", 3)


def test_the_picture_is_an_svg_that_fetches_nothing(tmp_path: Path) -> None:
    picture = tmp_path / "made" / "run.svg"
    record_run.draw(picture, ["autodist", "run", "train.py"], ["step 1: loss 2.5"])
    text = "".join(ElementTree.parse(picture).getroot().itertext()).replace("\N{NO-BREAK SPACE}", " ")
    assert "$ autodist run train.py" in text and "step 1: loss 2.5" in text
    assert "url(http" not in picture.read_text()
