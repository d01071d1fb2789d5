"""Runs whose processes somebody else starts, and that start again with a process that comes late, or without one."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from tests.cluster.runs import within
from tests.cluster.trainings import SINES, Training
from tests.ports import free_port

pytestmark = [pytest.mark.processes, pytest.mark.slow]

START = 90.0

# A start on LAST workers makes three steps; another one trains until the run ends it.
ELASTIC = (
    SINES
    + """
start = next(n for n in range(9) if not has_note(f"start{n}.{me}"))
note(f"start{start}.{me}")
begun = number = ad.steps_done
until = number + 3 if ad.num_workers == LAST and has_note("may end") else 10**9
variable, step = made("variable")
while number < until:
    step(batch(number))
    number += 1
    if number == begun + 7:
        note(f"made{start}.{me}")
expected = np.full(3, 0.1)
for before in range(number):
    x = batch(before)
    expected -= 0.3 * np.mean(x * np.cos(x * expected), 0)
keep(values=variable.numpy(), expected=expected, workers=ad.num_workers, begun=begun, pid=os.getpid())
"""
)


class ElasticTraining(Training):
    """A run of up to three processes on this machine, each started by `autodist run`.

    Args:
        directory: empty.
        last: number of workers of the start that ends the run.
        keys: keys of the YAML.
    """

    def __init__(self, directory: Path, last: int, keys: Mapping[str, object]) -> None:
        self._join = ["-m", "autodist", "run", "--join", f"127.0.0.1:{free_port('127.0.0.1')}", "--index"]
        spec = {"nodes": "given", **keys}
        script = ELASTIC.replace("LAST", str(last))
        super().__init__(directory, script, spec, command=[*self._join, "0", "--nodes", "2:3"], is_forked=False)
        self.environment |= {"AUTODIST_SECRET": secrets.token_hex(16)}
        self.followers: list[subprocess.Popen[bytes]] = []

    def __exit__(self, *about: object) -> None:
        super().__exit__(*about)
        for follower in self.followers:
            follower.kill()
            follower.wait()

    def follow(self, index: int, **environment: str) -> subprocess.Popen[bytes]:
        """Starts a process with an index."""
        with open(self.directory / f"output{len(self.followers)}", "wb") as out:
            process = subprocess.Popen(
                [sys.executable, *self._join, str(index), str(self.directory / "train.py")],
                stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=self.directory, start_new_session=True,
                env=self.environment | environment,
            )  # fmt: skip
        self.followers.append(process)
        return process

    def output_of(self, number: int) -> str:
        return (self.directory / f"output{number}").read_text()

    def statuses(self) -> list[int]:
        """Waits for the exit statuses of all processes but the chief."""
        assert within(20, lambda: all(one.poll() is not None for one in self.followers)), self.stderr
        return [one.wait() for one in self.followers]

    def assert_equal(self, workers: int) -> int:
        """Checks the values and the number of workers of the last start; returns the step at which it began."""
        kept = self.kept(0)
        assert (kept["workers"], kept["pid"]) == (workers, self.chief.pid)
        np.testing.assert_allclose(kept["values"], kept["expected"], rtol=1e-12)
        return int(kept["begun"])


def test_a_late_process_joins_once_its_versions_are_those_of_the_chief(tmp_path: Path) -> None:
    other = tmp_path / "packages" / "tensorflow-2.18.99.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: tensorflow\nVersion: 2.18.99\n")
    saving = {"checkpoint": {"folder": str(tmp_path / "saved"), "every_steps": 10**6}, "rejoin_interval": 0.5}
    with ElasticTraining(tmp_path / "run", 3, saving | {"min_nodes": 3}) as run:  # the command's number counts
        run.follow(1)
        run.wait_for_note("made0.0", START)
        refused = run.follow(2, PYTHONPATH=str(other.parent))
        assert within(20, lambda: refused.poll() is not None), run.stderr
        run.note("may end")
        run.follow(2)
        assert run.wait(2 * START) == 0, run.stderr
        assert run.statuses() == [0, 1, 0]
        run.assert_gone()
        begun, reported = run.assert_equal(3), run.stderr
    line = (
        f"all workers start again from the checkpoint of step {begun}, on 3 workers instead of 2, since process 2 on "
    )
    assert begun >= 7 and reported.count(line) == 1, reported
    reason = "TensorFlow is 2.18.99, on the chief "
    assert reported.count(reason) == 1 and reported.index(reason) < reported.index(line), reported
    assert f"autodist: the run cannot use this process: {reason}" in run.output_of(1)
    standby = "autodist: process 2 is on standby: the run trains on 2 workers without it."
    assert run.output_of(2).count(standby) == 1
    assert "Traceback" not in reported


def test_a_run_goes_on_with_the_processes_that_remain(tmp_path: Path) -> None:
    keys = {"checkpoint": {"folder": str(tmp_path / "saved"), "every_steps": 5}, "max_restarts": 1}
    with ElasticTraining(tmp_path / "run", 2, keys) as run:
        run.note("may end")
        lost = [run.follow(1), run.follow(2)][1]
        run.wait_for_note("made0.0", START)
        assert within(20, lambda: any((tmp_path / "saved").glob("*.index")))
        os.kill(lost.pid, signal.SIGKILL)
        assert run.wait(2 * START) == 0, run.stderr
        assert run.statuses() == [0, -signal.SIGKILL]
        run.assert_gone()
        begun, reported = run.assert_equal(2), run.stderr
    line = (
        f"all workers start again from the checkpoint of step {begun}, on 2 workers instead of 3 (restart 1 of 1, in "
    )
    assert begun >= 5 and reported.count(line) == 1, reported
    assert "the run starts again, and this process joins it" in run.output_of(0)
