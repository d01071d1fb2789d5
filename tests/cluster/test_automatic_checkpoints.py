"""`checkpoint` in the YAML on two workers: a run that is killed goes on, to the bit, with no line of its script."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from tests.cluster.trainings import Training

pytestmark = [pytest.mark.processes, pytest.mark.slow]

NODES = [{"address": "localhost", "cpus": [0, 1], "workers": 2}]
STRATEGY = {"builder": "PartitionedPS", "min_partition_bytes": 1}

LOOP = """
with ad.scope():
    variable = tf.Variable(np.arange(12.0).reshape(6, 2), name="table")
    momentum = tf.Variable(tf.zeros_like(variable), trainable=False, name="momentum")

    @ad.function(batch="global")
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.reduce_sum(tf.tanh(x @ variable) ** 2, 1))
        momentum.assign(0.9 * momentum + tf.convert_to_tensor(tape.gradient(loss, variable)))
        variable.assign_sub(0.1 * momentum)
        return loss

first = ad.steps_done
losses = []
for number in range(first, 12):
    if number == STOP:
        note(f"stopped{me}")
        wait_for("never")
    losses.append(float(step(np.random.default_rng(number).normal(size=(8, 6)))))
keep(first=first, losses=losses, variable=variable.numpy(), momentum=momentum.numpy())
"""

FIT = """
import keras
with ad.scope():
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.05), "mse", metrics=["mae"])

class Stops(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if int(model.optimizer.iterations) == STOP:
            note(f"stopped{me}")
            wait_for("never")

x = np.random.default_rng(0).normal(size=(40, 6)).astype("float32")
stopping = keras.callbacks.EarlyStopping("loss", patience=2)
history = model.fit(x, x[:, :1], batch_size=8, epochs=3, verbose=0, callbacks=[stopping, Stops()]).history
keep(first=0, losses=history["loss"], mae=history["mae"], best=stopping.best,
     **{f"v{k}": np.asarray(v) for k, v in enumerate([*model.variables, *model.optimizer.variables])})
"""


def started(directory: Path, script: str, folder: Path, stop: int) -> Training:
    spec = {"nodes": NODES, "strategy": STRATEGY, "checkpoint": {"folder": str(folder), "every_steps": 4}}
    return Training(directory, script.replace("STOP", str(stop)), spec)


def last_step(folder: Path) -> int:
    """Of the last checkpoint, which is the one of the script's end."""
    return json.loads(Path(f"{tf.train.latest_checkpoint(str(folder))}.json").read_text())["step"]


def finished(directory: Path, script: str, folder: Path) -> list[dict]:
    with started(directory, script, folder, stop=-1) as run:
        assert run.wait(180) == 0, run.stderr
        return [run.kept(worker) for worker in range(2)]


@pytest.mark.parametrize("script", [LOOP, FIT], ids=["loop", "fit"])
def test_a_run_whose_chief_is_killed_goes_on(tmp_path: Path, script: str):
    expected = finished(tmp_path / "whole", script, tmp_path / "whole_saved")
    with started(tmp_path / "killed", script, tmp_path / "saved", stop=9) as run:
        for worker in range(2):
            run.wait_for_note(f"stopped{worker}", 120)
        os.kill(run.chief.pid, signal.SIGKILL)
        run.wait(60)
    found = finished(tmp_path / "again", script, tmp_path / "saved")
    assert last_step(tmp_path / "saved") == last_step(tmp_path / "whole_saved") == (12 if script is LOOP else 15)
    for one, other in zip(found, expected, strict=True):
        first = int(one.pop("first"))
        other.pop("first")
        if script is LOOP:
            assert first in (4, 8)  # the last was in the background when its run was killed
            other["losses"] = other["losses"][first:]
        for name, value in other.items():
            np.testing.assert_array_equal(one[name], value, err_msg=name)
