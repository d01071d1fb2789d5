"""Extra state: generators, seeds and kernels' persistent buffers are restored with the values, or a warning has the
reason.
"""

from __future__ import annotations

import logging
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from autodist import AutoDist, ResourceSpec
from autodist.checkpoint.content import OURS
from autodist.checkpoint.files import sealed, unsealed
from autodist.strategies import AllReduce

X = np.random.default_rng(0).normal(size=(12, 5)).astype(np.float32)
SPEC = ResourceSpec.from_dict({"nodes": [{"address": "localhost", "cpus": [0, 1]}]})


def dropping(seed: int) -> tuple[AutoDist, keras.Model]:
    """As a script begins that sets a seed of its own each time it is run."""
    keras.backend.clear_session(free_memory=False)
    keras.utils.set_random_seed(seed)
    tf.random.set_seed(11)
    ad = AutoDist(resource_spec=SPEC, strategy=AllReduce())
    with ad.scope():
        layers = [keras.layers.Dropout(0.4), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((5,)), *layers])
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")
    return ad, model


def fit(model: keras.Model) -> list[float]:
    return model.fit(X, X[:, :1], batch_size=3, epochs=2, verbose=0).history["loss"]


def test_dropout_and_shuffles_of_fit_go_on_bit_for_bit(tmp_path):
    ad, model = dropping(seed=1)
    checkpoint = ad.checkpoint(tmp_path, model=model, optimizer=model.optimizer)
    fit(model)
    path = checkpoint.save()
    expected, values = fit(model), [v.numpy() for v in (*model.weights, *model.optimizer.variables)]
    again, other = dropping(seed=2)
    assert again.checkpoint(tmp_path, model=other, optimizer=other.optimizer).restore(path) == 0
    assert fit(other) == expected
    for value, found in zip(values, [*other.weights, *other.optimizer.variables], strict=True):
        np.testing.assert_array_equal(found, value)
    assert [name for name, _ in tf.train.list_variables(path) if name.startswith(OURS)]


def stepping(tmp_path: Path, draw: bool) -> tuple:
    ad = AutoDist(resource_spec=SPEC, strategy=AllReduce())
    with ad.scope():
        weight = tf.Variable(np.ones(5))

        @ad.function
        def step(x):
            with tf.GradientTape() as tape:
                y = x * tf.random.uniform([5], seed=1, dtype=tf.float64) if draw else x
                loss = tf.reduce_mean(tf.reduce_sum(y * weight, 1))
            weight.assign_sub(tape.gradient(loss, weight))
            return loss

    return ad.checkpoint(tmp_path, weight=weight), step


@pytest.mark.parametrize("draw", [False, True])
def test_draws_from_tensorflow_s_global_state_are_reported(tmp_path, caplog, draw):
    checkpoint, step = stepping(tmp_path, draw)
    step(X.astype(np.float64))
    checkpoint.save()
    with caplog.at_level(logging.WARNING, "autodist"):
        stepping(tmp_path, draw)[0].restore()
        assert ("RandomUniform draw from a TensorFlow" in caplog.text and "start over" in caplog.text) == draw
        caplog.clear()
        checkpoint.restore()
        assert ("continue as they are" in caplog.text) == draw


def test_residuals_of_compressors_on_other_workers_are_reported(tmp_path, caplog):
    """The files are those of two workers, one with a residual; here one worker resumes."""
    checkpoint, step = stepping(tmp_path, draw=False)
    step(X.astype(np.float64))
    path = checkpoint.save()
    side = Path(f"{path}.json")
    about = unsealed(side.read_text())
    reader = tf.train.load_checkpoint(path)
    values = {key: reader.get_tensor(key) for key in reader.get_variable_to_shape_map()}
    values[f"{OURS}memories/1/compressors/a/residual"] = np.ones(3)
    tf.raw_ops.SaveV2(
        prefix=path, tensor_names=list(values), shape_and_slices=[""] * len(values), tensors=list(values.values())
    )
    side.write_text(sealed({**about, "files": {}, "workers": 2, "inexact": ["weight"]}))
    with caplog.at_level(logging.WARNING, "autodist"):
        assert checkpoint.restore() == 0
    assert "for the gradients of weight are not restored: 2 workers have saved it, and 1 resume" in caplog.text
