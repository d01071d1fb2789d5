"""Ctrl-C at the chief, whose script may catch it: the run ends, and nothing waits for what never comes."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.cluster.trainings import Training

pytestmark = [pytest.mark.processes, pytest.mark.slow]

START = 60.0

TWO = {"nodes": [{"address": "localhost", "cpus": [0, 1], "workers": 2}]}

TRAIN = """
with ad.scope():
    variable = tf.Variable(np.zeros(3), name="variable")
    step = training(variable)

step(np.ones([2, 3]))
"""

CATCHES = """
try:
    if me == 0:
        note("ready")
    while not has_note("never"):
        step(np.ones([2, 3])) if {steps} or me else time.sleep(0.01)
except KeyboardInterrupt:
    print("caught by", me, variable.numpy().shape)
"""

WAITS = """
if me == 0:
    note("ready")
else:
    wait_for("never", 600)
"""


@pytest.mark.parametrize(
    ("script", "status", "printed"),
    [
        (CATCHES.format(steps=True), 0, "caught by 0 (3,)"),
        (CATCHES.format(steps=False), 0, "caught by 0 (3,)"),
        (WAITS, -signal.SIGINT, ""),
    ],
    ids=["in a step", "between steps", "at the end"],
)
def test_the_run_ends_at_once(tmp_path: Path, script: str, status: int, printed: str) -> None:
    with Training(tmp_path, TRAIN + script, TWO) as run:
        run.wait_for_note("ready", START)
        os.killpg(run.chief.pid, signal.SIGINT)
        assert run.wait(10) == status
        run.assert_gone(10)
    assert "stopping all workers: the chief was interrupted" in run.stderr
    assert run.stdout.strip() == printed
