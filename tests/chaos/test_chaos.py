"""Faults at random moments; scripts/chaos.py runs more of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.plays import play
from tests.chaos.schedules import BAND, ENDINGS, EVERY, LOSSES, MOST_RESTARTS, SHORT_CUT, draw

_PLAYED = (1018, 9, 14, 23, 24)
"""The first has four faults in one run: a kill while saving, one at the start, one in a step, and a full disk. The
others, which start again once, have the rest, two of them before the first step: a cut and a stop.
"""


def test_a_seed_gives_the_same_schedule_and_many_give_all_faults() -> None:
    drawn = [draw(seed) for seed in range(200)]
    assert drawn == [draw(seed) for seed in range(200)]
    assert {fault.kind for one in drawn for fault in one.faults} == {*LOSSES, *ENDINGS, SHORT_CUT}


def test_each_start_comes_to_its_fault_and_none_is_where_the_one_before_was() -> None:
    for schedule in map(draw, range(200)):
        assert schedule.restarts <= MOST_RESTARTS
        for start, fault in enumerate(schedule.faults):
            assert fault.step in range(BAND * start, BAND * (start + 1) - 1), schedule
            assert fault.kind not in ("kill while saving", "full disk") or (fault.step + 1) % EVERY == 0, schedule
            assert fault.kind not in (*ENDINGS, SHORT_CUT) or fault is schedule.faults[-1]


def test_what_is_played_has_each_fault() -> None:
    assert {fault.kind for seed in _PLAYED for fault in draw(seed).faults} == {*LOSSES, *ENDINGS, SHORT_CUT}


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.ssh
@pytest.mark.parametrize("seed", _PLAYED)
def test_a_run_recovers_or_ends_with_its_first_cause(seed: int, tmp_path: Path) -> None:
    play(draw(seed), tmp_path)
