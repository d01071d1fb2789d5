"""The feeds of a pipeline's workers together form the batch, as under every other strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cluster.trainings import Training

pytestmark = [pytest.mark.processes, pytest.mark.equivalence, pytest.mark.slow]

START = 120.0

DATA = """
draw = np.random.default_rng(0)
x, y = draw.normal(size=(23, 4)), draw.normal(size=(23, 2))
kernels = [draw.normal(size=shape) for shape in ((4, 3), (3, 2))]
n, ones = ad.num_workers, np.ones((4, 1))
"""

FUNCTION = (
    DATA
    + """
with ad.scope():
    variables = [tf.Variable(value, name=f"kernel_{k}") for k, value in enumerate(kernels)]

    @ad.function
    def step(rows, targets, ids):
        with tf.GradientTape() as tape:
            found = tf.tanh(rows @ variables[0]) @ variables[1] + tf.sparse.sparse_dense_matmul(ids, ones)
            loss = tf.reduce_mean((found - targets) ** 2)
        for variable, gradient in zip(variables, tape.gradient(loss, variables)):
            variable.assign_sub(0.1 * gradient)
        return loss, found

    losses = []
    for size in (23, 20, 1, 22):
        rows, targets = x[:size][me::n], y[:size][me::n]
        ids = tf.sparse.from_dense(np.maximum(rows - np.arange(size)[me::n, None] % 2, 0))
        loss, found = step(rows, targets, ids)
        assert found.shape == targets.shape, (found.shape, targets.shape)
        losses.append(float(loss))
    for numbers in ad.sampler(23, 8, seed=1):
        assert len(numbers)
        losses.append(float(step(x[numbers], y[numbers], tf.sparse.from_dense(0 * x[numbers]))[0]))
    for rows, targets in ad.distribute_dataset(tf.data.Dataset.from_tensor_slices((x, y)).batch(8)):
        assert len(rows)
        losses.append(float(step(rows, targets, tf.sparse.from_dense(0 * rows))[0]))
keep(losses=losses, first=variables[0].numpy(), second=variables[1].numpy())
"""
)

SESSION = (
    DATA
    + """
v1 = tf.compat.v1
with tf.Graph().as_default(), ad.scope():
    rows, targets = (v1.placeholder(tf.float64, [None, width]) for width in (4, 2))
    variables = [v1.get_variable(f"kernel_{k}", initializer=v, use_resource=True) for k, v in enumerate(kernels)]
    found = tf.tanh(rows @ variables[0]) @ variables[1]
    loss = tf.reduce_mean((found - targets) ** 2)
    train = v1.train.GradientDescentOptimizer(0.1).minimize(loss)
    with ad.create_distributed_session() as session:
        session.run(v1.global_variables_initializer())
        losses = []
        for size in (23, 20, 1, 22):
            fed = {rows: x[:size][me::n], targets: y[:size][me::n]}
            at, _, made = session.run([loss, train, found], fed)
            assert made.shape == fed[targets].shape, (made.shape, fed[targets].shape)
            losses.append(at)
        fed = {rows: x[me::n], targets: y[me::n]}
        evaluated, made = session.run([loss, found], fed)
        assert made.shape == fed[targets].shape, (made.shape, fed[targets].shape)
        first, second = session.run(variables)
keep(losses=[*losses, evaluated], first=first, second=second)
"""
)

SLICED = (
    """
import keras
keras.config.set_floatx("float64")
keras.utils.set_random_seed(1)
"""
    + DATA
    + """
class Parts(keras.utils.PyDataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        taken = ad.batch_slice(index * 8, min(index * 8 + 8, 23))
        assert taken.stop > taken.start
        return x[taken], y[taken]

with ad.scope():
    layers = [keras.Input((4,)), keras.layers.Dense(3, "tanh"), keras.layers.Dense(2)]
    model = keras.Sequential(layers)
    model.set_weights([kernels[0], np.zeros(3), kernels[1], np.zeros(2)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    losses = model.fit(Parts(), epochs=2, shuffle=False, verbose=0).history["loss"]
keep(losses=losses, first=model.get_weights()[0], second=model.get_weights()[2])
"""
)

FIT = (
    """
import keras
keras.config.set_floatx("float64")
keras.utils.set_random_seed(1)
"""
    + DATA
    + """
def mine(rows):  # my part of each batch of 8; the last one has 7
    return np.concatenate([(batch := rows[start : start + 8])[len(batch) * me // n : len(batch) * (me + 1) // n]
                           for start in range(0, 23, 8)])

with ad.scope():
    layers = [keras.Input((4,)), keras.layers.Dense(3, "tanh"), keras.layers.Dense(2)]
    model = keras.Sequential(layers)
    model.set_weights([kernels[0], np.zeros(3), kernels[1], np.zeros(2)])
    model.compile(keras.optimizers.Adam(0.1), "mse", metrics=["mae"])
    weights = np.arange(23.0)
    fitted = model.fit(mine(x), mine(y), batch_size=8 // n, sample_weight=mine(weights), epochs=2, shuffle=False,
                       validation_data=(x, y), verbose=0)
    losses = np.concatenate([fitted.history[name] for name in ("loss", "mae", "val_loss")])
keep(losses=losses, first=model.get_weights()[0], second=model.get_weights()[2], predicted=model.predict(x, verbose=0))
"""
)


def machines(workers: int, **strategy: Any) -> dict[str, Any]:
    nodes = [{"address": "localhost", "cpus": list(range(workers)), "workers": workers}]
    return {"nodes": nodes, **({"strategy": {"builder": "Pipeline", **strategy}} if strategy else {})}


def kept(folder: Path, script: str, spec: dict[str, Any], workers: int) -> list[dict[str, Any]]:
    with Training(folder, script, spec) as run:
        assert run.wait(START) == 0, run.stderr
        run.assert_gone()
        return [run.kept(worker) for worker in range(workers)]


@pytest.mark.parametrize("script", [SESSION, SLICED], ids=["session", "batch_slice"])
def test_own_parts_fed_to_two_stages_are_trained_on_as_one_device_trains_on_all(tmp_path: Path, script: str) -> None:
    [alone] = kept(tmp_path / "one", script, machines(1), 1)
    for worker, found in enumerate(kept(tmp_path / "stages", script, machines(2, micro_batches=3), 2)):
        for name, value in alone.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-9, err_msg=f"{name} of worker {worker}")


def test_own_parts_fed_to_two_pipelines_side_by_side_are_too(tmp_path: Path) -> None:
    [alone] = kept(tmp_path / "one", FUNCTION, machines(1), 1)
    spec = machines(4, micro_batches=3, mesh={"stage": 2, "data": 2})
    for found in kept(tmp_path / "mesh", FUNCTION, spec, 4):
        for name, value in alone.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-9, err_msg=name)


def test_fit_on_parts_that_workers_pass_trains_as_one_device_on_all(tmp_path: Path) -> None:
    own = {"batch": "per_worker"}
    [alone] = kept(tmp_path / "one", FIT, machines(1) | own, 1)
    spec = machines(4, micro_batches=2, mesh={"stage": 2, "data": 2}) | own
    for found in kept(tmp_path / "stages", FIT, spec, 4):
        for name, value in alone.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-9, err_msg=name)


PADDED = (
    DATA
    + """
with ad.scope():
    variables = [tf.Variable([[1.0]] * 3, dtype=tf.float64), tf.Variable([[1.0]], dtype=tf.float64)]

    @ad.function(input_signature=[tf.TensorSpec([None, None, 3], tf.float64)])
    def step(rows):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.reduce_mean(rows @ variables[0], 1) @ variables[1])
        for variable, gradient in zip(variables, tape.gradient(loss, variables)):
            variable.assign_sub(0.1 * gradient)
        return loss

    step(np.ones([2, 4 + me, 3]))
"""
)


def test_parts_of_different_lengths_are_refused_on_all_workers(tmp_path: Path) -> None:
    with Training(tmp_path, PADDED, machines(2, micro_batches=2)) as run:
        assert run.wait(START) == 1
        run.assert_gone()
    assert "CaptureError: worker 1 feeds rows as float64 of shape (2, 5, 3), and the chief as float64" in run.stderr
    assert "pad them to one length" in run.stderr
