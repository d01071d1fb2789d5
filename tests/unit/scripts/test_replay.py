"""scripts/replay.py: its output for a change, and its records."""

from __future__ import annotations

import pathlib
import runpy
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.replay import recorded
from tests.replay.cases import CASES
from tests.replay.rewriting import replay

SCRIPT = runpy.run_path(str(pathlib.Path(__file__).resolve().parents[3] / "scripts" / "replay.py"))
NAME = "generator-shuffle-2+1"

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Calls the script, which records in a folder of the test; returns its exit status and its output."""
    monkeypatch.setattr(recorded, "FOLDER", tmp_path)

    def call(*arguments: str, change: Callable[[str], str] = str) -> tuple[int, str]:
        made = replay(CASES[NAME])
        monkeypatch.setattr(sys, "argv", ["replay.py", *arguments])
        monkeypatch.setitem(SCRIPT["main"].__globals__, "replay", lambda _: replace(made, text=change(made.text)))
        status = SCRIPT["main"]()
        said = capsys.readouterr()
        return status, said.out + said.err

    return call


def test_what_was_recorded_and_is_the_same_is_not_shown(run: Run) -> None:
    assert run(NAME) == (1, f"{NAME}\n  was not recorded\n\n1 cases, 1 changed\n")
    assert run("--record", "generator-*")[0] == 0
    assert run(NAME) == (0, "1 cases, 0 changed\n")


def test_a_change_is_shown_until_it_is_recorded(run: Run) -> None:
    run("--record", NAME)
    status, said = run(NAME, change=lambda text: text.replace("RealDiv", "Mul"))
    assert status == 1 and "lines go" in said and "= RealDiv[" in said and "= Mul[" in said and "all else" not in said
    run("--record", NAME, change=lambda text: text.replace("RealDiv", "Mul"))
    assert run(NAME, change=lambda text: text.replace("RealDiv", "Mul"))[0] == 0


def test_other_names_are_told_as_such(run: Run) -> None:
    run("--record", NAME)
    status, said = run(NAME, change=lambda text: text.replace("replica_1/", "autodist/replica_1/"))
    assert status == 1 and "nodes have other names, and all else is the same" in said


def test_a_revision_has_what_it_has_recorded(run: Run, tmp_path: pathlib.Path) -> None:
    run("--record", NAME)
    identity = ["-c", "user.name=test", "-c", "user.email=test@localhost"]
    for command in (["init", "-q"], ["add", "."], [*identity, "commit", "-q", "-m", "first"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True, timeout=60)
    run("--record", NAME, change=str.upper)
    assert run(NAME, "--since", "HEAD")[0] == 0
    assert run(NAME)[0] == 1
    assert "was not recorded" in run(NAME, "--since", "no-such-revision")[1]


def test_what_belongs_to_no_case_is_told_and_forgotten(run: Run, tmp_path: pathlib.Path) -> None:
    run("--record", NAME)
    recorded.record("lost", "text")
    assert run(NAME) == (1, "1 cases, 0 changed; of no case: lost\n")
    run("--record", NAME)
    assert recorded.recorded_names() == [NAME]


def test_a_name_that_no_case_has_is_refused(run: Run) -> None:
    status, said = run("no_such_case")
    assert status == 2 and NAME in said
    status, said = run("--capture", "no_such_step")
    assert status == 2 and "generator" in said


def test_the_text_is_printed(run: Run) -> None:
    status, said = run("--text", NAME)
    assert status == 0 and replay(CASES[NAME]).text in said
