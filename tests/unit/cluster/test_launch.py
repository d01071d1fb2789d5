from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from autodist.cluster import launch
from autodist.cluster.launch import StoppedProcessCheck
from tests.cluster.runs import within


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as started:
        yield started
        started.kill()


def test_a_process_that_was_stopped_is_seen_at_the_second_look(process: subprocess.Popen[bytes]) -> None:
    seen = StoppedProcessCheck(process.pid)
    assert not seen.is_stopped()
    process.send_signal(signal.SIGSTOP)
    assert within(10, seen.is_stopped)
    assert seen.is_stopped()
    process.send_signal(signal.SIGCONT)
    assert within(10, lambda: Path(f"/proc/{process.pid}/stat").read_text().split()[2] == "S")
    assert not seen.is_stopped()


def test_one_that_runs_between_the_looks_is_not_stopped_nor_one_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter([("T", 7), ("T", 9), ("t", 12), ("t", 12), ("R", 12), ("T", 12), None, None])
    monkeypatch.setattr(launch, "_state_of", lambda process: next(looks))
    seen = StoppedProcessCheck(1)
    assert [seen.is_stopped() for _ in range(8)] == [False, False, False, True, False, False, False, False]
