"""Runs of small training scripts under AutoDist, whose workers the test may delay."""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.cluster.runs import MARK, NOTE, Run, workers_here
from tests.forked_python.start import ON_CPU

# The beginning of every script; `me` is the worker's index.
_SCRIPT = '''
import atexit, os, signal, time
{note}
def has_note(what):
    return os.path.exists(os.path.join({notes!r}, what))

def wait_for(what, limit=60):
    deadline = time.monotonic() + limit
    while not has_note(what):
        assert time.monotonic() < deadline, what
        time.sleep(0.01)

{before}
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore Ctrl-C
import gc
gc.disable()  # the collector takes a fifth of the import's time and frees nothing
import numpy as np
import tensorflow as tf
from autodist import AutoDist
gc.freeze()
gc.enable()

def keep(**values):
    """Leaves arrays for the test."""
    path = os.path.join({notes!r}, f"kept{{me}}")
    np.savez(path + ".part.npz", **values)
    os.rename(path + ".part.npz", path + ".npz")

ad = AutoDist({cluster!r})
me = ad.worker_index
note(f"worker{{me}}")

def training(variable):
    """A step that trains one variable of three numbers; its loss is linear, so that gradients depend on x alone."""
    @ad.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.reduce_sum(x * variable, 1))
        variable.assign_sub(0.5 * tape.gradient(loss, variable))
        return loss
    return step
'''


class Training(Run):
    """One run of a script, from `__enter__` to `__exit__`, which ends all processes that are left.

    Args:
        directory: empty, for the script, its output and its notes.
        script: script of every worker; it may `note`, `wait_for` notes (of the test, too) and `keep` arrays.
        spec: content of the YAML.
        before: code before the import of AutoDist; it may `note` and `wait_for` notes.
        command: options of Python before the script.
        mark: value of `MARK`, if it is already in use.
        is_forked: True if the processes on this machine are forked from one that has imported TensorFlow, if the
            script runs as `python train.py` and in the environment of the tests.
    """

    def __init__(
        self,
        directory: Path,
        script: str,
        spec: dict[str, Any],
        before: str = "",
        command: Sequence[str] = (),
        mark: str | None = None,
        is_forked: bool = True,
    ) -> None:
        self.directory, self.mark = directory, mark or secrets.token_hex(8)
        self._notes = directory / "notes"
        self._notes.mkdir(parents=True)
        cluster = directory / "cluster.yml"
        cluster.write_text(json.dumps(spec))  # YAML holds all of JSON
        file, notes = directory / "train.py", str(self._notes)
        parts = {"note": NOTE.format(notes=notes), "notes": notes, "cluster": str(cluster), "before": before}
        file.write_text(_SCRIPT.format(**parts) + script)
        self.forked_workers = workers_here(spec) - 1 if is_forked else None
        self._command = [sys.executable, *command, str(file)]
        self.environment = os.environ | ON_CPU | {MARK: self.mark}

    def note(self, what: str) -> None:
        """Lets workers that wait for it go on."""
        (self._notes / what).touch()

    def assert_kept(self, workers: int, expected: Mapping[str, np.ndarray]) -> None:
        """Checks that each worker has kept the expected arrays, to a relative 1e-9."""
        for worker in range(workers):
            kept = self.kept(worker)
            assert kept.keys() == expected.keys()
            for name, value in expected.items():
                np.testing.assert_allclose(kept[name], value, rtol=1e-9, atol=1e-12, err_msg=name)

    def kept(self, worker: int) -> dict[str, Any]:
        """Returns the values that a worker has stored."""
        with np.load(self._notes / f"kept{worker}.npz") as arrays:
            return dict(arrays)


SINES = """
def made(name):
    with ad.scope():
        variable = tf.Variable(np.full(3, 0.1), name=name)
    @ad.function(batch="global")
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.reduce_sum(tf.sin(x * variable), 1))
        variable.assign_sub(0.3 * tape.gradient(loss, variable))
        return loss
    return variable, step

def batch(number):
    return np.random.default_rng(number).normal(size=[2, 3])

def trained(steps):
    expected = np.full(3, 0.1)
    for x in map(batch, range(steps)):
        expected -= 0.3 * np.mean(x * np.cos(x * expected), 0)
    return expected
"""
"""Lines of a script: a variable of a name with a step that trains it on global batches, the batch of a number, and the
variable's values after a number of steps, computed by NumPy.
"""
