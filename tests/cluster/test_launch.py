"""`autodist.launch` outside of notebooks: in a script, at Python's prompt, and on other machines."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import pytest

from tests.cluster.hosts import LoopbackHosts
from tests.cluster.runs import MARK, Run
from tests.forked_python.start import ON_CPU

pytestmark = [pytest.mark.processes, pytest.mark.slow]

LIMIT = 280.0


class Launches(Run):
    """A script that launches functions; its processes on this machine start with TensorFlow imported.

    Args:
        directory: folder for the script and its outputs.
        script: its text.
        launches: number of launches, each of up to two workers here.
        arguments: arguments of the script.
        mark: value of `MARK`, if it is already in use.
    """

    forked_so = "launch"

    def __init__(
        self, directory: Path, script: str, launches: int, arguments: Sequence[str] = (), mark: str | None = None
    ) -> None:
        self.directory, self.mark, self.forked_workers = directory, mark or secrets.token_hex(8), launches
        directory.mkdir(exist_ok=True)
        (directory / "train.py").write_text(script)
        self._command = [sys.executable, "train.py", *arguments]
        self.environment = os.environ | ON_CPU | {MARK: self.mark}

    def run(self) -> Self:
        """Runs it to its end, after which nothing is left of it."""
        with self:
            assert self.wait(LIMIT) == 0, self.stderr
            self.assert_gone()
        return self


SCRIPT = """
import autodist

print("begins")
offset = 2

class Failed(Exception):
    def __init__(self, code, *, why):
        super().__init__(f"{code}: {why}")
        self.code = code

def train(ad, x):
    print("trains", ad.num_workers, __name__)
    if x is None:
        raise Failed(7, why="nothing is given")
    return x + offset

print("returned", autodist.launch(train, 3))
try:
    autodist.launch(train, None)
except Failed as failed:
    print("failed", failed.code, failed, str(failed.__cause__).count("raise Failed(7, why"))
"""

TYPED = """
import autodist
offset = 2
def train(ad, x):
    print("trains", ad.num_workers, __name__)
    return x + offset

print("returned", autodist.launch(train, 3))
"""


def test_a_script_launches_a_function_of_its_own_twice_and_is_not_run_again(tmp_path: Path) -> None:
    ended = Launches(tmp_path, SCRIPT, 2).run()
    assert ended.stdout.splitlines() == [
        *("begins", "trains 1 __main__", "returned 5"),
        *("trains 1 __main__", "failed 7 7: nothing is given 1"),
    ], ended.stderr


def test_what_is_typed_at_a_prompt_can_be_launched(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-i"], input=TYPED, capture_output=True, text=True, cwd=tmp_path, timeout=LIMIT, check=False
    )
    assert done.stdout.splitlines() == ["trains 1 __main__", "returned 5"], done.stderr


FAR = """
import json, sys
import autodist
import numpy as np

scale = np.array([1.0, 2.0])

def train(ad, x):
    print("trains", ad.worker_index)
    return ad.reduce(scale * (x + ad.worker_index), "sum")

print("returned", autodist.launch(train, 3, cluster=json.loads(sys.argv[1])))
"""


@pytest.mark.ssh
def test_a_function_goes_to_other_machines_which_have_no_such_script(tmp_path: Path) -> None:
    mark = secrets.token_hex(8)
    environment = {MARK: mark, "CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "2"}
    (tmp_path / "hosts").mkdir()
    with LoopbackHosts(tmp_path / "hosts", count=1, environment=environment) as hosts:
        ended = Launches(tmp_path / "run", FAR, 1, [json.dumps(hosts.spec())], mark).run()
    assert f"[{hosts.hosts[0].address}] trains 1\n" in ended.stdout
    assert ended.stdout.endswith("returned [ 7. 14.]\n"), ended.stdout


LOST = """
import os, signal
import autodist
import numpy as np

def batch(number):
    return np.random.default_rng(number).normal(size=[4, 3])

def train(ad, folder):
    import tensorflow as tf
    with ad.scope():
        variable = tf.Variable(np.full(3, 0.1), name="variable")

        @ad.function(batch="global")
        def step(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.reduce_sum(tf.sin(x * variable), 1))
            variable.assign_sub(0.3 * tape.gradient(loss, variable))
            return loss

    checkpoint = ad.checkpoint(folder, variable=variable)
    done = checkpoint.restore() or 0
    for number in range(done, 4):
        if number == 3 and done == 0 and ad.worker_index == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        step(batch(number))
        checkpoint.save(step=number + 1)
    return done, variable.numpy()

two = {"nodes": [{"address": "localhost", "cpus": [0, 1], "workers": 2}], "max_restarts": 1}
done, values = autodist.launch(train, "checkpoints", cluster=two)
expected = np.full(3, 0.1)
for number in range(4):
    expected -= 0.3 * np.mean(np.cos(batch(number) * expected) * batch(number), 0)
print("returned", done, abs(values / expected - 1).max() < 1e-12)
"""


def test_a_function_that_loses_a_worker_is_called_again_and_returns_once(tmp_path: Path) -> None:
    ended = Launches(tmp_path, LOST, 1).run()
    assert ended.stdout.splitlines() == ["returned 3 True"], ended.stdout + ended.stderr
    again = "all workers start again from the checkpoint of step 3 (restart 1 of 1"
    assert ended.stderr.count(again) == 1, ended.stderr
