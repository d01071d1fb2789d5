"""Runs that end by signals leave no temporary file."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.cluster.trainings import Training

pytestmark = [pytest.mark.processes, pytest.mark.slow]

# AutoGraph converts the step and the function, with their callees.
CONVERTED = """
def halved(x):
    while tf.reduce_max(x) > 1.0:
        x = x / 2.0
    return x

data = iter(tf.data.Dataset.from_tensors(tf.constant([4.0, 8.0])).map(lambda x: halved(x) if x[0] > 0 else x).repeat())
variable = tf.Variable([1.0, 2.0, 3.0])
with ad.scope():
    @ad.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.reduce_sum(x * variable, 1))
            if loss > 1e9:
                loss = loss * 2.0
        variable.assign_sub(0.5 * tape.gradient(loss, variable))
        return loss
    while True:
        next(data)
        step(np.ones((4, 3), np.float32))
        note(f"trained{me}")
"""


# As Python would have started, since it is a fork of a process that has imported TensorFlow.
AS_STARTED_SO = """
import sys, tempfile
os.environ["TMPDIR"], tempfile.tempdir, sys.dont_write_bytecode = {temporary!r}, None, False
"""


@pytest.mark.parametrize(("victim", "number"), [("worker1", signal.SIGKILL), ("worker0", signal.SIGTERM)])
def test_nothing_is_left_in_the_folder_of_temporary_files(tmp_path: Path, victim: str, number: signal.Signals) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    spec = {"nodes": [{"address": "localhost", "cpus": [0, 1], "workers": 2}]}
    before = AS_STARTED_SO.format(temporary=str(temporary))
    with Training(tmp_path / "run", CONVERTED, spec, before) as run:
        process = run.wait_for_note(victim, limit=90)
        for worker in (0, 1):
            run.wait_for_note(f"trained{worker}", limit=90)
        os.kill(process, number)
        assert run.wait(60) != 0
        run.assert_gone()
        assert list(temporary.rglob("*")) == []
