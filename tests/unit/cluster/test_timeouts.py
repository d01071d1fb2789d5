from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from autodist.cluster import timeouts
from autodist.cluster.timeouts import POLL_INTERVAL, Stopwatch, processor_share, wait_for


class Clock:
    """A clock that shows a settable time."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def counted(clock: Clock, share: float, seconds: float, step: float = POLL_INTERVAL) -> float:
    stopwatch = Stopwatch(share=lambda: share, clock=clock)
    for _ in range(round(seconds / step)):
        clock.now += step
        stopwatch.read()
    return stopwatch.read()


@pytest.mark.parametrize(("share", "seconds"), [(1.0, 60.0), (0.25, 15.0)])
def test_a_second_counts_by_what_a_process_gets_of_it(share: float, seconds: float) -> None:
    assert counted(Clock(), share, 60.0) == pytest.approx(seconds)


def test_looks_in_quick_succession_count_the_same() -> None:
    assert counted(Clock(), 1.0, 60.0, step=0.001) == pytest.approx(60.0, abs=POLL_INTERVAL)


def test_time_in_which_this_process_did_not_run_does_not_count() -> None:
    clock = Clock()
    stopwatch = Stopwatch(share=lambda: 1.0, clock=clock)
    clock.now += 3600
    assert stopwatch.read() == 2 * POLL_INTERVAL


@pytest.mark.parametrize(("running", "share"), [(1, 1.0), (4, 1.0), (8, 0.5), (1000, 0.1)])
def test_the_share_of_a_processor(running: int, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(Path, "read_text", lambda self: f"0.5 0.2 0.1 {running}/3000 12345\n")
    assert processor_share() == share


def test_the_share_of_a_processor_where_nothing_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(self: Path) -> str:
        raise FileNotFoundError(self)

    monkeypatch.setattr(Path, "read_text", missing)
    assert processor_share() == 1.0


def test_what_comes_true_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    changed, came = threading.Condition(), []

    def come() -> None:
        with changed:
            came.append(True)
            changed.notify_all()

    with changed:
        threading.Thread(target=come).start()
        assert wait_for(changed, lambda: came, 1000.0)


def test_what_does_not_come_true_is_not_waited_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts, "processor_share", lambda: 1.0)
    changed = threading.Condition()
    with changed:
        assert not wait_for(changed, lambda: False, 0.05)
