"""Runs whose processes somebody else starts, and that start again with a process that comes late, or without one."""

from __future__ import annotations

import os
import re
import secrets
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from tests.cluster.runs import Chief, within
from tests.cluster.trainings import SINES, Training
from tests.ports import free_port

pytestmark = [pytest.mark.processes, pytest.mark.slow]

START = 90.0

# A start on two workers that may end makes three steps; another one trains until the run ends it.
ELASTIC = (
    SINES
    + """
start = next(n for n in range(9) if not has_note(f"start{n}.{me}"))
note(f"start{start}.{me}")
begun = number = ad.steps_done
until = number + 3 if ad.num_workers == 2 and has_note("may end") else 10**9
variable, step = made("variable")
while number < until:
    step(batch(number))
    number += 1
    if number == begun + 7:
        note(f"made{start}.{me}")
keep(values=variable.numpy(), expected=trained(number), workers=ad.num_workers, begun=begun, pid=os.getpid())
"""
)


class ElasticTraining(Training):
    """A run of up to three processes on this machine, each started by `autodist run`.

    Args:
        directory: empty.
        keys: keys of the YAML.
    """

    def __init__(self, directory: Path, keys: Mapping[str, object]) -> None:
        self._join = ["-m", "autodist", "run", "--join", f"127.0.0.1:{free_port('127.0.0.1')}", "--index"]
        spec = {"nodes": "given", **keys}
        super().__init__(directory, ELASTIC, spec, command=[*self._join, "0", "--nodes", "2:3"])
        self.environment |= {"AUTODIST_SECRET": secrets.token_hex(16)}
        self.followers: list[Chief] = []

    def __exit__(self, *about: object) -> None:
        super().__exit__(*about)
        for follower in self.followers:
            follower.kill()
            follower.wait()

    def follow(self, index: int, **environment: str) -> Chief:
        """Starts a process with an index."""
        command = [sys.executable, *self._join, str(index), str(self.directory / "train.py")]
        with open(self.directory / f"output{len(self.followers)}", "wb") as out:
            process = self._start_process(command, self.environment | environment, out, out)
        self.followers.append(process)
        return process

    def output_of(self, number: int) -> str:
        return (self.directory / f"output{number}").read_text()

    def statuses(self) -> list[int]:
        """Waits for the exit statuses of all processes but the chief."""
        assert within(20, lambda: all(one.poll() is not None for one in self.followers)), self.stderr
        return [one.wait() for one in self.followers]

    def assert_equal(self) -> int:
        """Checks the values of the last start, which has two workers; returns the step at which it began."""
        kept = self.kept(0)
        assert (kept["workers"], kept["pid"]) == (2, self.chief.pid)
        np.testing.assert_allclose(kept["values"], kept["expected"], rtol=1e-12)
        return int(kept["begun"])


def test_a_late_process_joins_once_its_versions_are_those_of_the_chief_and_the_run_goes_on_without_it(
    tmp_path: Path,
) -> None:
    other = tmp_path / "packages" / "tensorflow-2.18.99.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: tensorflow\nVersion: 2.18.99\n")
    saved = tmp_path / "saved"
    keys = {"checkpoint": {"folder": str(saved), "every_steps": 100}, "rejoin_interval": 0.5, "max_restarts": 1}
    with ElasticTraining(tmp_path / "run", keys | {"min_nodes": 3}) as run:  # the command's number counts
        run.follow(1)
        run.wait_for_note("made0.0", START)
        refused = run.follow(2, PYTHONPATH=str(other.parent))
        assert within(20, lambda: refused.poll() is not None), run.stderr
        late = run.follow(2)
        run.wait_for_note("made1.0", 2 * START)
        grown, known = run.stderr, set(saved.glob("*.index"))
        assert within(20, lambda: set(saved.glob("*.index")) - known)
        run.note("may end")
        os.kill(late.pid, signal.SIGKILL)
        assert run.wait(2 * START) == 0, run.stderr
        assert run.statuses() == [0, 1, -signal.SIGKILL]
        run.assert_gone()
        begun, reported = run.assert_equal(), run.stderr
    start = "all workers start again from the checkpoint of step "
    (joined,) = re.findall(f"{start}(\\d+), on 3 workers instead of 2, since process 2 on ", reported)
    assert 7 <= int(joined) <= begun
    assert reported.count(f"{start}{begun}, on 2 workers instead of 3 (restart 1 of 1, in ") == 1, reported
    reason = "TensorFlow is 2.18.99, on the chief "
    assert reported.count(reason) == 1 and reported.index(reason) < reported.index(start), reported
    assert f"autodist: the run cannot use this process: {reason}" in run.output_of(1)
    standby = "autodist: process 2 is on standby: the run trains on 2 workers without it."
    assert run.output_of(2).count(standby) == 1
    assert "Traceback" not in grown
    assert run.output_of(0).count("the run starts again, and this process joins it") == 2
