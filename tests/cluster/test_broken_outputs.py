"""Chiefs whose output has no reader, or whose disk is full: training continues, or ends with its cause."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import IO

import pytest

from tests.cluster.runs import Chief
from tests.cluster.trainings import Training

pytestmark = [pytest.mark.processes, pytest.mark.slow]

UNFLUSHED = 120
"""Python's own exit status if it cannot flush its output at its end."""

SPEC = {"nodes": [{"address": "localhost", "cpus": [0, 1], "workers": 2}]}

# The chief's output stays in Python's buffer, and is pending when the strategy's table is made.
TRAINS = """
print("pending")
variable = tf.Variable([1.0, 2.0, 3.0])
with ad.scope():
    step = training(variable)
    for number in range(3):
        step(np.ones((4, 3), np.float32))
        if me:
            print(number)
keep(variable=variable.numpy())
"""

PRINTS = """
variable = tf.Variable([1.0, 2.0, 3.0])
with ad.scope():
    step = training(variable)
    step(np.ones((4, 3), np.float32))
    print("the chief's own line", flush=True)
    while True:
        step(np.ones((4, 3), np.float32))
"""


class BrokenOutput(Training):
    """A training whose chief has an unusable standard output.

    Args:
        directory: empty.
        script: script of every worker.
        output: "head", as in `python train.py | head -1` when that has ended, or a device.
        error: a device for standard error, in place of a file.
        is_forked: as for `Run`.
    """

    def __init__(
        self, directory: Path, script: str, output: str, error: str | None = None, is_forked: bool = True
    ) -> None:
        super().__init__(directory, script, SPEC, is_forked=is_forked)
        self._devices = output, error
        self.environment.pop("PYTHONUNBUFFERED", None)

    def _start(self, out: IO[bytes], err: IO[bytes]) -> Chief:
        output, error = self._devices
        with ExitStack() as stack:
            out = stack.enter_context(open(_nobody_reads() if output == "head" else output, "wb"))
            if error is not None:
                err = stack.enter_context(open(error, "wb"))
            return super()._start(out, err)


def _nobody_reads() -> int:
    reading, writing = os.pipe()
    os.close(reading)
    return writing


@pytest.mark.parametrize(
    ("output", "problem", "is_forked"),
    [("head", "Broken pipe", False), ("/dev/full", "No space left on device", True)],
)
def test_training_ends_well_and_python_reports_what_was_lost(
    tmp_path: Path, output: str, problem: str, is_forked: bool
) -> None:
    with BrokenOutput(tmp_path, TRAINS, output, is_forked=is_forked) as run:
        assert run.wait(90) == UNFLUSHED, run.stderr
        run.assert_gone(0)
        for worker in (0, 1):
            assert run.kept(worker)["variable"].tolist() == [-0.5, 0.5, 1.5]
    assert "autodist: the strategy:" in run.stderr
    assert run.stderr.count("the chief's stdout takes no more") == 1
    assert problem in run.stderr.splitlines()[-1]


def test_print_of_the_script_that_raises_ends_the_run_with_the_cause(tmp_path: Path) -> None:
    with BrokenOutput(tmp_path, PRINTS, "head") as run:
        assert run.wait(90) == UNFLUSHED
        run.assert_gone(0)
    assert "BrokenPipeError: [Errno 32] Broken pipe" in run.stderr
    assert "autodist: stopping all workers: the chief's script failed" in run.stderr


def test_log_that_finds_the_disk_full_ends_nothing(tmp_path: Path) -> None:
    with BrokenOutput(tmp_path, TRAINS, "/dev/null", "/dev/full") as run:
        assert run.wait(90) == 0  # at the end, the log goes through a filter, which drops lines that it cannot write
        run.assert_gone(0)
        assert run.kept(0)["variable"].tolist() == [-0.5, 0.5, 1.5]
