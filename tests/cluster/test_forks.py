"""Processes forked by a script hold neither ports nor connections of the run."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from autodist.cluster.ports import reserve_port
from tests.cluster.runs import within
from tests.cluster.trainings import Training

pytestmark = [pytest.mark.processes, pytest.mark.slow]

# Pools created before the worker joins its run, before its server listens, and while it trains.
POOLS = """
import multiprocessing, subprocess, sys

fork = multiprocessing.get_context("fork")
early = EARLY
pools = [fork.Pool(1)]
inheriting = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], close_fds=False)
variable = tf.Variable([1.0, 2.0, 3.0])
with ad.scope():
    step = training(variable)
    for number in range(3):
        step(np.ones((4, 3), np.float32))
        pools.append(fork.Pool(1))
    answers = [pool.map(abs, [-number])[0] for number, pool in enumerate([early, *pools])]
keep(variable=variable.numpy(), answers=np.array(answers))
inheriting.kill()
inheriting.wait()
for pool in [early, *pools]:
    pool.terminate()
    pool.join()
"""

LEAVES_A_CHILD = """
import sys

variable = tf.Variable([1.0, 2.0, 3.0])
with ad.scope():
    step = training(variable)
    step(np.ones((4, 3), np.float32))
    child = os.fork()
    if child == 0:
        sys.exit(0)  # runs exit handlers, which must not treat the child as the worker
    assert os.waitpid(child, 0)[1] == 0
    if me == 0 and os.fork() == 0:
        note("child")
        time.sleep(600)
    note(f"trained{me}")
    while True:
        step(np.ones((4, 3), np.float32))
"""


class EarlyPool(Training):
    """A training whose script makes a pool before it makes its AutoDist."""

    def __init__(self, directory: Path, script: str, spec: dict[str, Any]) -> None:
        super().__init__(directory, script.replace("EARLY", "first_pool"), spec)
        file = directory / "train.py"
        made = 'import multiprocessing\nfirst_pool = multiprocessing.get_context("fork").Pool(1)\n'
        file.write_text(made + file.read_text())


def test_pools_made_before_and_between_and_in_training_do_no_harm(tmp_path: Path) -> None:
    spec = {"nodes": [{"address": "localhost", "cpus": [0, 1], "workers": 2}]}
    with EarlyPool(tmp_path, POOLS, spec) as run:
        assert run.wait(120) == 0, run.stderr
        run.assert_gone()
        for worker in (0, 1):
            assert run.kept(worker)["variable"].tolist() == [-0.5, 0.5, 1.5]
            assert run.kept(worker)["answers"].tolist() == [0, 1, 2, 3, 4]


def test_child_that_outlives_the_chief_keeps_no_port_and_no_worker(tmp_path: Path) -> None:
    with ExitStack() as stack:
        found = reserve_port(None)
        found.release()
        spec = {"nodes": [{"address": "localhost", "cpus": [0, 1], "workers": 2, "port": found.port}]}
        run = stack.enter_context(Training(tmp_path, LEAVES_A_CHILD, spec))
        child = run.wait_for_note("child", limit=120)
        worker = run.wait_for_note("worker1")
        run.wait_for_note("trained1", limit=60)
        stack.callback(os.kill, child, signal.SIGKILL)
        run.chief.kill()
        run.chief.wait()
        assert within(20, lambda: not Path(f"/proc/{worker}").exists())
        assert Path(f"/proc/{child}").exists()
        reserve_port(found.port).release()
        reserve_port(found.port + 1).release()
