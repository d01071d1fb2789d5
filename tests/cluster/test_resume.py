"""A run of 2N steps equals N steps, a checkpoint, a restore in another process, and N steps: bit for bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from tests.cluster.trainings import Training

pytestmark = [pytest.mark.processes, pytest.mark.slow]

SCRIPT = """
import keras
import logging
told = []
class Told(logging.Handler):
    def emit(self, record):
        told.append(record.getMessage())
logging.getLogger("autodist").addHandler(Told())

tf.random.set_seed(7)
examples = np.random.default_rng(0).normal(size=(40, 12)).astype("float32")
with ad.scope():
    keras.utils.set_random_seed(SEED)  # other initial values, other states: all of it comes from the checkpoint
    tf.random.set_seed(7)
    model = keras.Sequential([
        keras.Input((12,)), keras.layers.Dense(24, "relu"), keras.layers.Dropout(0.3), keras.layers.Dense(8),
        keras.layers.GaussianNoise(0.1), keras.layers.Dense(1),
    ])
    optimizer = keras.optimizers.Adam(0.01)
    noise = tf.random.Generator.from_seed(SEED)
    data = ad.distribute_dataset(tf.data.Dataset.from_tensor_slices(examples).shuffle(40).batch(8))

    @ad.function
    def step(x):
        with tf.GradientTape() as tape:
            y = model(x + 0.01 * noise.normal(tf.shape(x)), training=True)
            loss = tf.reduce_mean(tf.square(y - tf.reduce_sum(x, 1, keepdims=True)))
        optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
        return loss

optimizer.build(model.trainable_variables)
checkpoint = ad.checkpoint(FOLDER, model=model, optimizer=optimizer, data=data)
np.random.seed(10 * SEED + me)  # each draws noise of its own
done = checkpoint.restore() or 0
losses, first = [], done

def until(count):
    global done
    while done < count:
        for batch in data:
            losses.append(float(step(batch + 0.01 * np.random.normal(size=12).astype("float32"))))
            done += 1
            if done == 7:
                checkpoint.save(step=done)
            if done == count:
                return

until(14)
drawn = tf.random.uniform([3])
values = {f"v{k}": np.asarray(v) for k, v in enumerate([*model.variables, *optimizer.variables, noise.state])}
keep(first=first, losses=losses, drawn=drawn, told=" ".join(told), **values)
"""

NODES = [{"address": "localhost", "cpus": [0, 1], "workers": 2}]
STRATEGY = {
    "builder": "AllReduce",
    "compressor": {"kind": "TOP_K", "fraction": 0.2},
    "variables": {
        "sequential/dense_1/kernel": {"synchronizer": "PS", "owner": 1, "local_proxy_variable": True},
        "sequential/dense/kernel": {"synchronizer": "PS", "owner": 1, "value_compressor": "INT8"},
    },
}


def test_a_run_that_goes_on_is_the_run_that_went_on(tmp_path: Path):
    """Dropout, noise, a generator, Adam, a shuffled data set in its second epoch, residuals, a proxy, a rounded one."""
    folder = tmp_path / "saved"
    whole, rest = (trained(tmp_path / str(seed), folder, seed) for seed in (1, 2))
    saved = tf.train.list_variables(tf.train.latest_checkpoint(folder))
    assert {name.split("/")[2] for name, _ in saved if name.endswith("/residual")} == {"0", "1"}, "of each worker"
    for one, other in zip(whole, rest, strict=True):
        assert other.pop("first") == 7 and one.pop("first") == 0
        np.testing.assert_array_equal(other.pop("losses"), one.pop("losses")[7:])
        assert "is not restored" not in str(other.pop("told")) and one.pop("told") is not None
        for name, value in one.items():
            np.testing.assert_array_equal(other[name], value, err_msg=name)


def trained(directory: Path, folder: Path, seed: int) -> list[dict]:
    """Returns the values that each worker has stored in one run."""
    script = SCRIPT.replace("FOLDER", repr(str(folder))).replace("SEED", str(seed))
    with Training(directory, script, {"nodes": NODES, "strategy": STRATEGY}) as run:
        assert run.wait(180) == 0, run.stderr
        return [run.kept(worker) for worker in range(2)]
