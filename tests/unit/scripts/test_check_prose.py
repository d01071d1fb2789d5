"""scripts/check_prose.py: sentences that start with a relative clause are listed, questions and code are not."""

from __future__ import annotations

import pathlib
import runpy

import pytest

SCRIPT = runpy.run_path(str(pathlib.Path(__file__).resolve().parents[3] / "scripts" / "check_prose.py"))


@pytest.fixture
def listed(tmp_path, monkeypatch):
    """Writes a file and returns the sentences that the script lists, without their places."""
    monkeypatch.setitem(SCRIPT["faults"].__globals__, "ROOT", tmp_path)

    def call(name: str, text: str) -> list[str]:
        path = tmp_path / name
        path.write_text(text)
        return [fault.partition(": ")[2] for fault in SCRIPT["faults"](path)]

    return call


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('"""What a step writes."""', ["What a step writes."]),
        (
            '"""Returns a step.\n\n    Where it fails, nothing is written.\n    """',
            ["Where it fails, nothing is written."],
        ),
        ('def f():\n    """Whether it holds."""', ["Whether it holds."]),
        ('LIMIT = 3\n"""How long it waits."""', ["How long it waits."]),
        ('class Error(Exception):\n    """Who is it?"""', []),
        ('x = """What is no docstring."""', []),
        ('"""Returns what it holds."""', []),
    ],
)
def test_docstrings_are_looked_at(listed, text, found):
    assert listed("module.py", text) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("# What it does\n\nIt runs. Which\nof them, nobody says.\n", ["Which of them, nobody says."]),
        ("- Where it waits, it says so.\n", ["Where it waits, it says so."]),
        ("```\nWhat is code.\n```\n\n    How it is indented.\n\n| What | is a table |\n", []),
    ],
)
def test_pages_are_looked_at(listed, text, found):
    assert listed("page.md", text) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("# A builder.\na:\n  # The number. How many\n  # there are.\n  b: 1\n", ["How many there are."]),
        ("What: 1  # a key\n", []),
    ],
)
def test_comments_of_yaml_are_looked_at(listed, text, found):
    assert listed("preset.yml", text) == found
