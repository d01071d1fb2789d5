"""`checkpoint` in the YAML on two workers: a killed run resumes bit for bit without a change to its script."""

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
tf.random.set_seed(7)
np.random.seed(me)  # noise of each worker's own
examples = np.random.default_rng(1).normal(size=(40, 6))
data = iter(ad.distribute_dataset(tf.data.Dataset.from_tensor_slices(examples).shuffle(40).repeat().batch(8)))
with ad.scope():
    variable = tf.Variable(np.arange(12.0).reshape(6, 2), name="table")
    momentum = tf.Variable(tf.zeros_like(variable), trainable=False, name="momentum")

    @ad.function
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
    losses.append(float(step(next(data) + 0.1 * np.random.normal(size=6))))
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
history = model.fit(x, x[:, :1], batch_size=8, epochs=2, verbose=0, callbacks=[stopping, Stops()]).history
rows = tf.data.Dataset.from_tensor_slices((x, x[:, 1:2])).shuffle(40).map(lambda a, b: (tf.sin(a), b)).batch(8)
then = model.fit(rows, epochs=2, verbose=0, callbacks=[Stops()]).history  # each worker maps its own elements
keep(losses=history["loss"] + then["loss"], mae=history["mae"] + then["mae"], best=stopping.best,
     **{f"v{k}": np.asarray(v) for k, v in enumerate([*model.variables, *model.optimizer.variables])})
"""


def started(
    directory: Path, script: str, folder: Path, stop: int, strategy: dict = STRATEGY, every_steps: int = 4
) -> Training:
    spec = {"nodes": NODES, "strategy": strategy, "checkpoint": {"folder": str(folder), "every_steps": every_steps}}
    return Training(directory, script.replace("STOP", str(stop)), spec)


def last_step(folder: Path) -> int:
    """Of the last checkpoint, which is the one of the script's end."""
    return json.loads(Path(f"{tf.train.latest_checkpoint(str(folder))}.json").read_text())["step"]


def finished(directory: Path, script: str, folder: Path, **said) -> list[dict]:
    with started(directory, script, folder, stop=-1, **said) as run:
        assert run.wait(180) == 0, run.stderr
        return [run.kept(worker) for worker in range(2)]


def killed(directory: Path, script: str, folder: Path, stop: int, **said) -> None:
    """Kills the chief when each worker has made as many steps."""
    with started(directory, script, folder, stop=stop, **said) as run:
        for worker in range(2):
            run.wait_for_note(f"stopped{worker}", 120)
        os.kill(run.chief.pid, signal.SIGKILL)
        run.wait(60)


def test_a_fit_whose_chief_is_killed_goes_on(tmp_path: Path):
    """Interrupts `fit` twice: in an epoch over arrays, and in one over elements; workers read parts of both."""
    expected = finished(tmp_path / "whole", FIT, tmp_path / "whole_saved")
    for stop in (9, 18):
        killed(tmp_path / f"killed{stop}", FIT, tmp_path / "saved", stop)
    found = finished(tmp_path / "again", FIT, tmp_path / "saved")
    assert last_step(tmp_path / "saved") == last_step(tmp_path / "whole_saved") == 20
    for one, other in zip(found, expected, strict=True):
        for name, value in other.items():
            np.testing.assert_array_equal(one[name], value, err_msg=name)


def test_a_loop_goes_on_after_the_end_of_its_script_and_after_a_kill_with_what_each_worker_keeps(tmp_path: Path):
    """Residuals of compressors and noise are of each worker's own. No save comes before the end of the first script."""
    said = {"strategy": {"builder": "AllReduce", "compressor": {"kind": "TOP_K", "fraction": 0.2}}}
    expected = finished(tmp_path / "whole", LOOP, tmp_path / "whole_saved", **said)
    finished(tmp_path / "first", LOOP.replace("12)", "5)"), tmp_path / "saved", every_steps=100, **said)
    saved = [name for name, _ in tf.train.list_variables(tf.train.latest_checkpoint(tmp_path / "saved"))]
    assert {name.split("/")[2] for name in saved if name.endswith("/residual")} == {"0", "1"}, "of each worker"
    assert last_step(tmp_path / "saved") == 5
    killed(tmp_path / "killed", LOOP, tmp_path / "saved", 9, **said)
    found = finished(tmp_path / "again", LOOP, tmp_path / "saved", **said)
    assert last_step(tmp_path / "saved") == last_step(tmp_path / "whole_saved") == 12
    for one, other in zip(found, expected, strict=True):
        first = int(one.pop("first"))
        assert first in (5, 8)  # the last was in the background when its run was killed
        np.testing.assert_array_equal(one["losses"], other["losses"][first:])
        np.testing.assert_array_equal(one["variable"], other["variable"])
        np.testing.assert_array_equal(one["momentum"], other["momentum"])
