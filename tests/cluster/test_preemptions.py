"""SIGTERM before a machine is preempted: the run saves a checkpoint at a common step and ends."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from autodist.checkpoint.read import read_about
from tests.cluster.runs import parent, survivors
from tests.cluster.trainings import SINES, Training
from tests.ports import free_port

pytestmark = [pytest.mark.processes, pytest.mark.slow]

START = 60.0

TRAIN_FOR_EVER = """
atexit.register(lambda: note(f"left{me}"))
with ad.scope():
    variable = tf.Variable(np.zeros(3), name="variable")
step = training(variable)
while True:
    step(np.ones([2, 3]))
    note(f"made{me}")
"""

# A longer limit than the default for the end of a script, since its completion is asserted.
TWO = {"nodes": [{"address": "localhost", "cpus": [0, 1], "workers": 2}], "stop_timeout": 30}


def terminate(processes: Iterable[int]) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):  # the first one's end may have ended it
            os.kill(process, signal.SIGTERM)


def around(script: int) -> list[int]:
    """A worker's script, its guard and its agent."""
    guard = parent(script)
    return [script, guard, parent(guard)]


def saved_in(folder: Path) -> tuple[int, np.ndarray]:
    """Step and values of the one checkpoint there."""
    (saved,) = folder.glob("ckpt-*.index")
    prefix = str(saved.with_suffix(""))
    return read_about(prefix)["step"], tf.train.load_checkpoint(prefix).get_tensor("variable")


def preempted(folder: Path) -> dict[str, Any]:
    return {"checkpoint": {"folder": str(folder), "on_preempt": True}}


@pytest.mark.parametrize("of", ["the chief", "another worker"])
def test_it_is_saved_and_the_run_ends_by_the_signal(of: str, tmp_path: Path) -> None:
    with Training(tmp_path / "run", TRAIN_FOR_EVER, TWO | preempted(tmp_path / "saved")) as run:
        run.wait_for_note("made0", START)
        chief, script = run.chief.pid, run.wait_for_note("made1", START)
        terminate([chief] if of == "the chief" else around(script))
        assert run.wait(START) == -signal.SIGTERM, run.stderr
        run.assert_gone()
        assert run.has_note("left0") and run.has_note("left1")
        reported = run.stderr
    steps, values = saved_in(tmp_path / "saved")
    np.testing.assert_array_equal(values, np.full(3, -0.5 * steps))
    came = "came" if of == "the chief" else "came to localhost:1"
    assert f"stopping all workers: SIGTERM {came}; {steps} steps were made" in reported, reported
    assert "Traceback" not in reported


def test_a_scheduler_sends_it_to_all_processes_and_the_run_is_saved_before_it_ends(tmp_path: Path) -> None:
    spec = {"nodes": "given", "join_timeout": START} | preempted(tmp_path / "saved")
    run = Training(tmp_path / "run", TRAIN_FOR_EVER, spec)
    run.environment |= {
        "AUTODIST_WORKERS": "2",
        "AUTODIST_CHIEF": f"127.0.0.1:{free_port('127.0.0.1')}",
        "AUTODIST_SECRET": secrets.token_hex(16),
        "AUTODIST_INDEX": "0",
    }
    other = [sys.executable, str(run.directory / "train.py")]
    own = run.environment | {"AUTODIST_INDEX": "1"}
    with (
        run,
        open(tmp_path / "other", "wb") as printed,
        subprocess.Popen(other, stdin=subprocess.DEVNULL, stdout=printed, stderr=printed, env=own, cwd=tmp_path) as one,
    ):
        run.wait_for_note("made1", START)
        terminate(survivors(run.mark))
        assert run.wait(START) == -signal.SIGTERM, run.stderr
        assert one.wait(START) == 128 + signal.SIGTERM
        run.assert_gone()
        reported = run.stderr
    steps, values = saved_in(tmp_path / "saved")
    np.testing.assert_array_equal(values, np.full(3, -0.5 * steps))
    assert f"stopping all workers: SIGTERM came; {steps} steps were made" in reported, reported
    said = (tmp_path / "other").read_text()
    assert "this process was sent SIGTERM; the chief saves the trained values" in said, said


GOES_ON = (
    SINES
    + """
start = int(has_note(f"start0.{me}"))
note(f"start{start}.{me}")

number = ad.steps_done
until = number + 3 if start else 10**9
variable, step = made("variable")
while number < until:
    step(batch(number))
    number += 1
    note(f"made{me}")
values = variable.numpy()
expected, step = made("beside")
for before in range(number):
    step(batch(before))
keep(values=values, expected=expected.numpy(), replicas=ad.num_replicas, begun=until - 3)
"""
)


@pytest.mark.busy
def test_where_a_worker_s_machine_goes_away_the_others_go_on_without_it_and_no_step_is_lost(tmp_path: Path) -> None:
    nodes = [{"address": "127.0.0.1", "chief": True}, {"address": "127.0.0.2"}]
    spec = {"nodes": nodes, "max_restarts": 1, "min_nodes": 1} | preempted(tmp_path / "saved")
    with Training(tmp_path / "run", GOES_ON, spec) as run:
        run.wait_for_note("made0", START)
        terminate([run.wait_for_note("made1", START)])
        assert run.wait(3 * START) == 0, run.stderr
        run.assert_gone()
        kept, reported = run.kept(0), run.stderr
    assert kept["replicas"] == 1
    np.testing.assert_allclose(kept["values"], kept["expected"], rtol=1e-12)
    steps = int(kept["begun"])
    assert steps > 0
    expected = (
        f"all workers start again from the checkpoint of step {steps} (restart 1 of 1, in 1 s), since in step "
        f"{steps + 1} 127.0.0.2 was sent SIGTERM, which announces that its machine goes away. 127.0.0.2 is left out "
        "(`min_nodes` is 1)."
    )
    assert expected in reported, reported
