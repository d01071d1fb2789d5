"""A step that is refused: by all workers, after which the run goes on, or by one, after which it ends for all."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.cluster.trainings import Training

pytestmark = pytest.mark.processes

START = 60.0

SCRIPT = """
from autodist.errors import CaptureError
with ad.scope():
    weight = tf.Variable(np.zeros(3))
    step = training(weight)

    @ad.function
    def refused(x):
        raise CaptureError("this step is refused")

    step(np.ones((2, 3)))
    for _ in range(2):
        try:
            if {refuses}:
                refused(np.ones((2, 3)))
            else:
                step(np.ones((2, 3)))
        except Exception as error:
            print("caught", type(error).__name__)
    step(np.ones((2, 3)))
    keep(weight=weight.numpy())
"""


@pytest.mark.parametrize("builder", ["AllReduce", "PS"])
def test_after_a_refusal_that_all_workers_meet_the_run_goes_on(tmp_path: Path, builder: str) -> None:
    nodes = [{"address": "localhost", "cpus": [0, 1], "workers": 2}]
    spec = {"nodes": nodes, "strategy": {"builder": builder}}
    with Training(tmp_path, SCRIPT.format(refuses="True"), spec) as run:
        assert run.wait(START) == 0, run.stderr
        run.assert_gone()
        for worker in range(2):
            np.testing.assert_allclose(run.kept(worker)["weight"], np.full(3, -1.0), rtol=1e-12)
    assert run.stdout.count("caught CaptureError") == 4


@pytest.mark.parametrize("worker", [0, 1])
def test_a_refusal_that_one_worker_meets_ends_all_at_once_with_its_cause(tmp_path: Path, worker: int) -> None:
    spec = {"nodes": [{"address": "localhost", "cpus": [0, 1], "workers": 2}]}
    with Training(tmp_path, SCRIPT.format(refuses=f"me == {worker}"), spec) as run:
        assert run.wait(START) != 0
        run.assert_gone()
    assert "CaptureError: " in run.stderr and "this step is refused" in run.stderr
