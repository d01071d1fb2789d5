"""A pipeline whose stages are divided over a mesh, on four workers: Keras, a function and a session train alike."""

from __future__ import annotations

import inspect
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.cluster.trainings import Training

pytestmark = [pytest.mark.processes, pytest.mark.slow]

CLUSTER = {
    "nodes": [{"address": "localhost", "cpus": [0, 1, 2, 3], "workers": 4}],
    "batch": "global",
    "strategy": {
        "builder": "Pipeline",
        "micro_batches": 2,
        "schedule": "1F1B",
        "mesh": {"stage": 2, "model": 2},
        "variables": {
            ".*(up/kernel|kernel_0)": {"sharding": [None, "model"]},
            ".*(down/kernel|kernel_1)": {"sharding": ["model"]},
        },
    },
}


def fitted() -> dict[str, np.ndarray]:
    """Trains, evaluates and predicts by Keras; returns the results and the weights."""
    keras.config.set_floatx("float64")
    keras.utils.set_random_seed(1)
    ids = keras.Input((6,), dtype="int32")
    x = keras.layers.Embedding(12, 8)(ids)
    for block in range(2):
        y = keras.layers.Dense(16, activation="gelu", name=f"b{block}_up")(keras.layers.LayerNormalization()(x))
        x = keras.layers.Add()([x, keras.layers.Dense(8, name=f"b{block}_down")(y)])
    model = keras.Model(ids, keras.layers.Dense(12, name="head")(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-2, global_clipnorm=0.5), loss, metrics=["accuracy"])
    inputs, labels = np.random.default_rng(0).integers(0, 12, (2, 20, 6)).astype("int32")
    trained = model.fit(inputs, labels, batch_size=7, epochs=2, shuffle=False, verbose=0).history
    evaluated = model.evaluate(inputs, labels, batch_size=9, verbose=0)
    found = {"evaluated": np.array(evaluated), "predicted": model.predict(inputs, batch_size=9, verbose=0)}
    return found | {name: np.array(value) for name, value in trained.items()} | {
        f"weight {k}": weight for k, weight in enumerate(model.get_weights())
    }  # fmt: skip


def stepped(function) -> dict[str, np.ndarray]:
    """Trains by a step of its own, and sets a variable of each stage between two steps."""
    shapes, x = [(5, 6), (6, 4), (4, 6), (6, 2)], np.random.default_rng(0).normal(size=(9, 5))
    kernels = [
        tf.Variable(np.cos(np.arange(float(np.prod(shape))) + k).reshape(shape), name=f"kernel_{k}")
        for k, shape in enumerate(shapes)
    ]
    total = tf.Variable(np.float64(0.0), name="total")

    @function
    def step(x):
        with tf.GradientTape() as tape:
            made = x
            for kernel in kernels:
                made = tf.tanh(made @ kernel)
            loss = tf.reduce_mean(made**2)
        for kernel, gradient in zip(kernels, tape.gradient(loss, kernels)):
            kernel.assign_sub(0.1 * gradient)
        total.assign_add(loss)
        return loss, made

    losses = [step(x[:rows])[0].numpy() for rows in (9, 8, 1)]
    for kernel in (kernels[0], kernels[3]):
        kernel.assign(0.5 * kernel)
    loss, made = step(x)
    values = {f"kernel {k}": kernel.numpy() for k, kernel in enumerate(kernels)}
    return {"losses": np.array([*losses, loss]), "made": made.numpy(), "total": total.numpy(), **values}


def session_of(create) -> dict[str, np.ndarray]:
    """Trains in a session of TensorFlow 1."""
    v1 = tf.compat.v1
    given = v1.placeholder(tf.float64, [None, 5])
    hidden = given
    for k, shape in enumerate([(5, 6), (6, 4), (4, 6), (6, 2)]):
        initial = np.cos(np.arange(float(np.prod(shape))) + k).reshape(shape)
        hidden = tf.tanh(hidden @ v1.get_variable(f"kernel_{k}", initializer=initial))
    loss = tf.reduce_mean(tf.square(hidden))
    train = v1.train.AdamOptimizer(0.01).minimize(loss)
    session = create()
    session.run(v1.global_variables_initializer())
    x = np.random.default_rng(0).normal(size=(9, 5))
    losses = [session.run([loss, train], {given: x[:rows]})[0] for rows in (9, 8, 2)]
    values = dict(zip("abcd", session.run(v1.trainable_variables()), strict=True))
    return {"of the session": np.array(losses), "hidden": session.run(hidden, {given: x[:5]}), **values}


def test_stages_on_a_mesh_train_as_one_device(tmp_path: Path) -> None:
    functions = "".join(map(inspect.getsource, (fitted, stepped, session_of)))
    trained = """
with ad.scope():
    kept = {**fitted(), **stepped(ad.function(batch="global"))}
with tf.Graph().as_default(), ad.scope():
    keep(**kept, **session_of(ad.create_distributed_session))
"""
    floatx = keras.config.floatx()
    expected = {**fitted(), **stepped(lambda step: step)}
    keras.config.set_floatx(floatx)
    with tf.Graph().as_default():
        expected |= session_of(tf.compat.v1.Session)
    with Training(tmp_path, "import keras\n" + functions + trained, CLUSTER) as run:
        assert run.wait(400) == 0, run.stderr
        run.assert_gone()
        run.assert_kept(4, expected)
    assert "mesh {stage: 2, data: 1, model: 2}" in run.stderr
    assert "all_reduce of stage 1" in run.stderr
