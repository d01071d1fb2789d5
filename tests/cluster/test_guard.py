"""The guard process of a script, tested alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cluster.runs import halt, within

pytestmark = [pytest.mark.processes]

LIMIT, SUSPENDED = 2.0, 4.0

SCRIPT = """
import pathlib, signal, sys, time
here = pathlib.Path(sys.argv[1])

def end(number, frame):
    (here / "asked").touch()
    while not (here / "go").exists():
        time.sleep(0.01)
    (here / "left").touch()
    sys.exit(7)

signal.signal(signal.SIGTERM, end)
(here / "ready").touch()
while True:
    time.sleep(0.1)
"""


def guarded(reports: int, *script: str) -> subprocess.Popen[bytes]:
    handed = os.open(os.devnull, os.O_RDONLY)
    guard = [sys.executable, "-P", "-m", "autodist.cluster.guard", str(reports), str(handed), str(LIMIT)]
    try:
        return subprocess.Popen(
            [*guard, sys.executable, "-c", *script], stdin=subprocess.PIPE, pass_fds=[reports, handed]
        )
    finally:
        os.close(handed)


@pytest.mark.parametrize("is_suspended", ["the guard", "the script"])
def test_what_did_not_run_has_its_time_to_end_afterwards(is_suspended: str, tmp_path: Path) -> None:
    reported, reports = os.pipe()
    with open(reported, "rb") as numbers, guarded(reports, SCRIPT, str(tmp_path)) as guard:
        os.close(reports)
        script = int(numbers.readline())
        assert within(30, (tmp_path / "ready").exists)
        if is_suspended == "the script":  # SIGTERM alone would not reach it
            halt(script)
            (tmp_path / "go").touch()
        assert guard.stdin is not None
        guard.stdin.close()
        assert within(30, (tmp_path / "asked").exists)
        if is_suspended == "the guard":  # as if the whole machine was suspended: its clock continued
            os.kill(guard.pid, signal.SIGSTOP)
            time.sleep(SUSPENDED)
            os.kill(guard.pid, signal.SIGCONT)
            (tmp_path / "go").touch()
        assert int(numbers.readline()) == 7
        assert guard.wait(30) == 0
    assert (tmp_path / "left").exists()
    assert not Path(f"/proc/{script}").exists()


def test_a_script_has_its_status_though_whoever_asked_for_it_ignores_the_ends_of_children() -> None:
    reported, reports = os.pipe()
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        guard = guarded(reports, "import os; os._exit(3)")
    finally:
        signal.signal(signal.SIGCHLD, before)
    os.close(reports)
    with open(reported, "rb") as numbers, guard:
        assert [int(line) for line in numbers][1:] == [3]
