"""The recipes of docs/engines.md, run by real engines on this machine; `./scripts/engines` installs these."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

from tests.forked_python.start import ON_CPU
from tests.unit.docs.pages import blocks_of

pytestmark = [pytest.mark.processes, pytest.mark.slow]

NEEDED = {
    "ray_training.py": "ray",
    "dask_training.py": "distributed",
    "processes.py": None,
    "spark_training.py": "pyspark",
}
RECIPES = {more.removeprefix('title="').removesuffix('"'): text for more, text in blocks_of("engines.md", "py") if more}


def needs(package: str | None) -> pytest.MarkDecorator:
    is_missing = package is not None and importlib.util.find_spec(package) is None
    return pytest.mark.skipif(
        is_missing, reason=f"{package} is not installed; ./scripts/engines installs all but pyspark"
    )


def run(directory: Path, file: str, text: str, limit: float = 400) -> str:
    """Runs a script with all that its engine starts, in a process group of its own; returns its output."""
    (directory / file).write_text(text)
    variables = os.environ | ON_CPU | {"RAY_DEDUP_LOGS": "0", "RAY_ADDRESS": "local", "HOME": str(directory)}
    variables["PYSPARK_PYTHON"] = sys.executable
    process = subprocess.Popen(
        [sys.executable, file], cwd=directory, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=limit)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert process.returncode == 0, output
    return output


def test_the_page_has_all_recipes() -> None:
    assert set(RECIPES) <= set(NEEDED)


@pytest.mark.parametrize("file", [pytest.param(file, marks=needs(NEEDED[file])) for file in RECIPES])
def test_a_recipe_trains_what_one_device_trains(tmp_path: Path, file: str) -> None:
    draws = np.random.default_rng(0)
    x, y = draws.normal(size=(64, 4)).astype("float32"), draws.normal(size=(64, 1)).astype("float32")
    np.savez(tmp_path / "data.npz", x=x, y=y)
    run(tmp_path, file, RECIPES[file])
    trained = keras.models.load_model(tmp_path / "model.keras")
    keras.utils.set_random_seed(1)
    dtype = "float32"  # not that of an earlier test of this process: Keras fixes the default at its first use
    alone = keras.Sequential([keras.layers.Dense(8, "relu", dtype=dtype), keras.layers.Dense(1, dtype=dtype)])
    alone.compile("adam", "mse")
    alone.fit(x, y, batch_size=16, epochs=3, verbose=0)
    for one, other in zip(trained.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


KILLED_ACTOR = """
import os, signal
import keras, numpy as np, ray
import autodist

class Killed(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if epoch == 1:
            os.kill(os.getpid(), signal.SIGKILL)

def train(index, join):
    with autodist.join(index=index, workers=2, chief="127.0.0.1:15000") as ad, ad.scope():
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("adam", "mse")
        model.fit(np.ones([64, 4]), np.ones([64, 1]), batch_size=16, epochs=9, callbacks=[Killed()] if index else [])

@ray.remote(num_cpus=1, max_restarts=0)
class Actor:
    def train(self, index):
        train(index, autodist.join)

    def process(self):
        return os.getpid()

ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 << 20)
actors = [Actor.remote() for _ in range(2)]
process = ray.get(actors[0].process.remote())
training = [actor.train.remote(index) for index, actor in enumerate(actors)]
for task in training:
    try:
        ray.get(task, timeout=200)
    except Exception as error:
        error = getattr(error, "cause", error)
        print("RAISED", type(error).__name__, str(error).partition("\\n")[0])
assert ray.get(actors[0].process.remote()) == process, "the actor goes on"
try:
    ray.get(actors[0].train.remote(0))
except autodist.errors.ClusterError as error:
    print("AGAIN", str(error.cause))
ray.shutdown()
"""


@needs("ray")
def test_a_killed_actor_is_told_in_the_other_which_goes_on_and_joins_no_second_run(tmp_path: Path) -> None:
    output = run(tmp_path, "killed.py", KILLED_ACTOR)
    found = [line for line in output.splitlines() if line.startswith(("RAISED", "AGAIN"))]
    assert found[0].startswith("RAISED WorkerFailedError 127.0.0.1:1 was lost: "), output
    assert "ActorDiedError" in found[1]
    assert "has been a worker before, by the function train" in found[2]
