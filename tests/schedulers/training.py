"""The training that the schedulers start, and its processes."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from tests.cluster.runs import MARK, all_gone, survivors, within
from tests.forked_python.start import ON_CPU

# With SLOW=n, the first n starts of a job train so slowly that they are met in the middle.
_SCRIPT = """
import atexit, os, pathlib, sys, time
import keras, numpy as np
from autodist import AutoDist

keras.backend.set_floatx("float64")
ad = AutoDist("cluster.yml")
keras.utils.set_random_seed(1)
examples = np.random.default_rng(0).normal(size=(64, 4))

def note(event):
    number = sys.argv[2] if len(sys.argv) > 2 else "0"
    pathlib.Path(f"{event}.{number}.{ad.worker_index}").write_text(str(os.getpid()))

class Slow(keras.callbacks.Callback):
    made = 0

    def on_train_batch_end(self, batch, logs=None):
        self.made += 1
        if self.made == 3:
            note("trains")
        if int(os.environ.get("SLURM_RESTART_COUNT", 0)) < int(os.environ.get("SLOW", 0)):
            time.sleep(0.5)

atexit.register(note, "left")
with ad.scope():
    model = keras.Sequential([keras.layers.Dense(5, "tanh"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.1), "mse")
    model.fit(examples, examples.sum(1, keepdims=True), batch_size=16, epochs=60, verbose=0, callbacks=[Slow()])
if ad.is_chief:
    np.savez(sys.argv[1] if len(sys.argv) > 1 else "model", *model.get_weights())
print("trained on", ad.num_workers, flush=True)
"""


class Training:
    """A folder with the script and its YAML, for the processes of one scenario.

    Args:
        directory: empty; the processes' home and their folder of temporary files are in it.
        more: keys of the YAML in addition to `nodes: given`.

    Attributes:
        environment: environment variables of the processes.
    """

    def __init__(self, directory: Path, more: Mapping[str, object] | None = None) -> None:
        self.directory, self._mark = directory, secrets.token_hex(8)
        self._temporary = directory / "tmp"
        self._temporary.mkdir()
        (directory / "train.py").write_text(_SCRIPT)
        (directory / "cluster.yml").write_text(json.dumps({"nodes": "given", "join_timeout": 60} | dict(more or {})))
        own = {MARK: self._mark, "HOME": str(directory), "TMPDIR": str(self._temporary)}
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("AUTODIST_", "SLURM_"))}
        self.environment = inherited | ON_CPU | own
        self.environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin:/sbin"

    def start(self, command: list[str], more: Mapping[str, str], output: str = "output") -> subprocess.Popen[bytes]:
        """Starts a command in the folder, whose output goes to a file there."""
        with open(self.directory / output, "wb") as out:
            return subprocess.Popen(
                command, cwd=self.directory, env=self.environment | dict(more), stdin=subprocess.DEVNULL, stdout=out,
                stderr=out, start_new_session=True,
            )  # fmt: skip

    def output(self, name: str = "output") -> str:
        path = self.directory / name
        return path.read_text() if path.exists() else ""

    def wait_until_it_trains(self, workers: int = 2, limit: float = 90, run: str = "0") -> list[int]:
        """Waits until all workers have made some steps, and returns the ids of their processes, by their worker.

        In namespaces of processes, the ids are those there.
        """
        notes = [self.directory / f"trains.{run}.{worker}" for worker in range(workers)]
        assert within(limit, lambda: all(note.exists() and note.read_text() for note in notes)), self.output()
        return [int(note.read_text()) for note in notes]

    def has_left(self, worker: int, run: str = "0") -> bool:
        """Returns True if the exit handlers of a worker have run."""
        return (self.directory / f"left.{run}.{worker}").exists()

    def weights(self, name: str) -> list[np.ndarray]:
        with np.load(self.directory / f"{name}.npz") as loaded:
            return [loaded[key] for key in loaded.files]

    def assert_weights(
        self, other: Training, other_name: str = "model", name: str = "model", rounding: float = 0
    ) -> None:
        """Checks that two trainings have ended with the same bits, or the same values except for their rounding."""
        for own, its in zip(self.weights(name), other.weights(other_name), strict=True):
            np.testing.assert_allclose(own, its, rtol=rounding, atol=rounding)

    def processes(self) -> list[int]:
        """Returns the ids of all processes of the scenario."""
        return survivors(self._mark)

    def assert_gone(self, limit: float = 15) -> None:
        """Checks that the processes have left nothing: no process, no secret, no temporary file."""
        assert all_gone(self._mark, limit), [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in self.processes()]
        assert not list(self.directory.glob(".autodist/*"))
        assert not list(self._temporary.iterdir())
