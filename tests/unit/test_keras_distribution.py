"""`keras.distribution` in the scope, around it and before it: honoured if AutoDist does the same, else rejected."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.distribution import DataParallel, DeviceMesh, LayoutMap, ModelParallel
from keras.distribution import set_distribution as imported_before

from autodist import AutoDist, ResourceSpec
from autodist.capture import other_strategies
from autodist.errors import CaptureError
from tests.unit.test_keras_inputs import assert_fits_alike

pytestmark = pytest.mark.usefixtures("keras_in_float64", "unset")

REFUSED = r"keras.distribution's \w+ is set, which Keras ignores on TensorFlow.*Remove it"
X, Y = np.random.default_rng(0).normal(size=(11, 6)), np.random.default_rng(1).normal(size=(11, 2))


@pytest.fixture
def unset() -> Iterator[None]:
    other_strategies._note_data_parallel.cache_clear()
    yield
    keras.distribution.set_distribution(None)


def model_parallel() -> Any:
    mesh = DeviceMesh((1, 2), ["batch", "model"], ["cpu:0", "cpu:1"])
    layouts = LayoutMap(mesh)
    layouts["dense.*kernel"] = (None, "model")
    return ModelParallel(layout_map=layouts, batch_dim_name="batch")


class Own(DataParallel):
    """A script's own subclass, with any settings."""


def autodist(replicas: int = 2) -> AutoDist:
    node = {"address": "localhost", "cpus": list(range(replicas))}
    return AutoDist(resource_spec=ResourceSpec.from_dict({"nodes": [node]}))


def dense() -> keras.Model:
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(2)])
    model.compile(keras.optimizers.Adam(0.1), "mse")
    return model


@pytest.mark.parametrize("make", [DataParallel, lambda: DataParallel(devices=[f"cpu:{k}" for k in range(7)])])
@pytest.mark.parametrize("is_before", [True, False])
def test_data_parallel_trains_as_one_device_on_the_replicas_of_the_yaml_and_is_told_once(
    make: Any, is_before: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "autodist")
    if is_before:
        keras.distribution.set_distribution(make())

    def made() -> keras.Model:
        if not is_before:
            keras.distribution.set_distribution(make())
        return dense()

    assert_fits_alike(made, lambda model: model.fit(X, Y, batch_size=4, epochs=2, shuffle=False, verbose=0))
    said = [record.getMessage() for record in caplog.records]
    assert len([one for one in said if one.startswith("AutoDist trains as keras.distribution.DataParallel does")]) == 1


@pytest.mark.parametrize("make", [model_parallel, Own])
def test_what_autodist_does_not_do_is_refused_by_name_where_it_is_set(make: Any) -> None:
    other = make()
    with autodist().scope():
        with pytest.raises(CaptureError, match=REFUSED) as raised:
            keras.distribution.set_distribution(other)
        with pytest.raises(CaptureError, match=REFUSED), other.scope():
            pass
        assert keras.distribution.distribution() is None
    assert type(other).__name__ in str(raised.value)


def test_the_scope_after_it_and_within_it_is_refused() -> None:
    other = model_parallel()
    with other.scope(), pytest.raises(CaptureError, match=REFUSED), autodist().scope():
        pass
    keras.distribution.set_distribution(other)
    with pytest.raises(CaptureError, match=REFUSED), autodist().scope():
        pass
    keras.distribution.set_distribution(None)
    with autodist().scope():
        keras.distribution.set_distribution(None)


def test_one_that_is_set_by_a_name_imported_before_is_refused_at_the_end_of_the_scope_and_in_fit() -> None:
    ad = autodist()
    with ad.scope():
        model = dense()
    with pytest.raises(CaptureError, match=REFUSED), ad.scope():
        imported_before(model_parallel())
    with pytest.raises(CaptureError, match=REFUSED):
        model.fit(X, Y, verbose=0)


def test_one_that_is_set_after_the_scope_is_refused_by_the_step() -> None:
    ad = autodist()
    with ad.scope():
        weight = tf.Variable(np.ones((6, 2)))

        @ad.function
        def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(x @ weight - y))
            weight.assign_sub(0.1 * tape.gradient(loss, weight))
            return loss

    keras.distribution.set_distribution(model_parallel())
    with pytest.raises(CaptureError, match=REFUSED):
        step(X, Y)
    keras.distribution.set_distribution(None)
    assert np.isfinite(step(X, Y))
    assert keras.distribution.set_distribution is imported_before
