"""scripts/chaos.py: all schedules run, and the total is printed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.schedules import Schedule
from tests.loaded_scripts import load_script

chaos = load_script("chaos")


def test_schedules_after_one_that_fails_are_played_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    played: list[int] = []

    def play(schedule: Schedule, directory: Path) -> None:
        played.append(schedule.seed)
        if schedule.seed == 71:
            raise AssertionError("names another cause")
        if schedule.seed == 73:
            raise ValueError("no JSON")

    monkeypatch.setattr(chaos, "play", play)
    monkeypatch.setattr("sys.argv", ["chaos.py", "--seed", "70", "--draws", "5"])
    assert chaos.main() == 1
    assert played == [70, 71, 72, 73, 74]
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "5 schedules played, 2 failed: seeds 71, 73"
    assert "AssertionError: names another cause" in lines and "ValueError: no JSON" in lines


def test_the_status_is_0_where_all_recover(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(chaos, "play", lambda schedule, directory: None)
    monkeypatch.setattr("sys.argv", ["chaos.py", "--draws", "3"])
    assert chaos.main() == 0
    assert capsys.readouterr().out.splitlines()[-1] == "3 schedules played, 0 failed"
