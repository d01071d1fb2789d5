"""A map that calls marked Python code runs on each worker for its own elements, and trains as on one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cluster.trainings import Training

pytestmark = [pytest.mark.processes, pytest.mark.equivalence]

START = 60.0

SCRIPT = """
import keras
keras.config.set_floatx("float64")
keras.utils.set_random_seed(1)
calls = []

@ad.elementwise
def decode(number):
    calls.append(int(number))
    return np.cos(np.arange(3.0) + number)

def loaded(number):
    row = tf.ensure_shape(tf.{caller}(decode, [number], tf.float64), [3])
    return row, tf.reduce_sum(row, keepdims=True)

data = tf.data.Dataset.range(27).shuffle(27).map(loaded).batch(10)
with ad.scope():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    losses = model.fit(data, epochs=2, verbose=0).history["loss"]
    fitted = len(calls)

    @ad.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        model.optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    losses += [float(step(x, y)) for x, y in ad.distribute_dataset(data)]
keep(losses=losses, first=model.get_weights()[0], second=model.get_weights()[2], calls=[fitted, len(calls) - fitted])
"""


def kept(folder: Path, workers: int, caller: str, **strategy: Any) -> list[dict[str, Any]]:
    nodes = [{"address": "localhost", "cpus": list(range(workers)), "workers": workers}]
    with Training(folder, SCRIPT.replace("{caller}", caller), {"nodes": nodes, **strategy}) as run:
        assert run.wait(START) == 0, run.stderr
        run.assert_gone()
        assert "is computed for all examples" not in run.stderr
        return [run.kept(worker) for worker in range(workers)]


@pytest.mark.parametrize(("caller", "builder"), [("py_function", "AllReduce"), ("numpy_function", "PS")])
def test_two_workers_decode_their_own_elements_and_train_as_one_device(
    tmp_path: Path, caller: str, builder: str
) -> None:
    [alone] = kept(tmp_path / "one", 1, caller)
    both = kept(tmp_path / "two", 2, caller, strategy={"builder": builder})
    assert alone["calls"].tolist() == [54, 27]
    assert [one["calls"].tolist() for one in both] == [[28, 14], [26, 13]]
    for one in both:
        for name in ("losses", "first", "second"):
            np.testing.assert_allclose(one[name], alone[name], rtol=1e-9, err_msg=name)
