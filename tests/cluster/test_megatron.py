"""Megatron on two workers: `fit`, `evaluate`, `predict` and a session train as one device does."""

from __future__ import annotations

import inspect
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.cluster.test_keras_distribution import transformer
from tests.cluster.trainings import Training

pytestmark = pytest.mark.processes

CLUSTER = {
    "nodes": [{"address": "localhost", "cpus": [0, 1], "workers": 2}],
    "strategy": {"builder": "Megatron", "mesh": {"model": 2}},
    "batch": "global",
}


def session_of(create) -> dict[str, np.ndarray]:
    """Trains a perceptron of a TensorFlow 1 graph; returns its losses and variables."""
    v1 = tf.compat.v1
    given = v1.placeholder(tf.float64, [None, 5])
    hidden = given
    for k, shape in enumerate([(5, 6), (6, 4)]):
        initial = np.cos(np.arange(float(np.prod(shape))) + k).reshape(shape)
        hidden = tf.tanh(hidden @ v1.get_variable(f"kernel_{k}", initializer=initial))
    loss = tf.reduce_mean(tf.square(hidden))
    train = v1.train.AdamOptimizer(0.01).minimize(loss)
    session = create()
    session.run(v1.global_variables_initializer())
    x = np.random.default_rng(0).normal(size=(9, 5))
    losses = [session.run([loss, train], {given: x[:rows]})[0] for rows in (9, 8, 2)]
    return {"losses": np.asarray(losses)} | dict(zip("ab", session.run(v1.trainable_variables()), strict=True))


def test_megatron_trains_as_one_device(tmp_path: Path) -> None:
    functions = inspect.getsource(transformer) + inspect.getsource(session_of)
    trained = """
with ad.scope():
    kept = transformer()
with tf.Graph().as_default(), ad.scope():
    keep(**kept, **session_of(ad.create_distributed_session))
"""
    floatx = keras.config.floatx()
    expected = transformer()
    keras.config.set_floatx(floatx)
    with tf.Graph().as_default():
        expected |= session_of(tf.compat.v1.Session)
    with Training(tmp_path, "import keras\n" + functions + trained, CLUSTER) as run:
        assert run.wait(120) == 0, run.stderr
        run.assert_gone()
        run.assert_kept(2, expected)
    for text in ("mesh {model: 2}", "Megatron: columns", "Megatron: rows", "Megatron: vocabulary"):
        assert text in run.stderr, text
