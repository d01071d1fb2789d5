"""`batch_norm: whole | replica`: the examples that Keras's batch normalization uses."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

from autodist import AutoDist, ResourceSpec

DRAWS = np.random.default_rng(0)
X = DRAWS.normal(size=(13, 6, 6, 3))
Y = DRAWS.normal(size=(13, 1))

pytestmark = pytest.mark.usefixtures("keras_in_float64")


def fitted(content: dict[str, Any] | None) -> tuple[list[float], list[np.ndarray]]:
    """Returns the losses and the weights of a model with batch normalization; None: on one device."""
    keras.utils.set_random_seed(1)

    def fit() -> tuple[list[float], list[np.ndarray]]:
        inputs = keras.Input((6, 6, 3))
        x = layers.BatchNormalization(name="of_images")(layers.Conv2D(4, 3, use_bias=False, name="cut")(inputs))
        x = layers.BatchNormalization(momentum=0.9)(layers.Dense(4, "relu")(layers.Flatten()(x)))
        model = keras.Model(inputs, layers.Dense(1)(x))
        model.compile(keras.optimizers.SGD(0.1, 0.9), "mse")
        history = model.fit(X, Y, batch_size=5, epochs=2, shuffle=False, verbose=0).history
        return history["loss"], model.get_weights()

    if content is None:
        return fit()
    spec = {"nodes": [{"address": "localhost", "cpus": [0, 1]}], **content}
    with AutoDist(resource_spec=ResourceSpec.from_dict(spec)).scope():
        return fit()


@pytest.fixture(scope="module")
def alone() -> tuple[list[float], list[np.ndarray]]:
    keras.config.set_floatx("float64")
    return fitted(None)


MESH = {"builder": "Mesh", "mesh": {"model": 2}, "variables": {"cut/kernel": {"sharding": [None, None, None, "model"]}}}


@pytest.mark.parametrize(
    "content",
    [
        {"batch_norm": "whole"},
        {"batch_norm": "whole", "strategy": "PS"},
        {"strategy": {"builder": "Mesh", "mesh": {"data": 2}}},
        {"strategy": MESH},
    ],
    ids=("all-reduce", "servers", "data rows of a mesh", "a mesh without data rows"),
)
def test_the_whole_batch_has_the_numbers_of_one_device(content: dict[str, Any], alone: Any) -> None:
    losses, weights = fitted(content)
    np.testing.assert_allclose(losses, alone[0], rtol=1e-9)
    for mine, its in zip(weights, alone[1], strict=True):
        np.testing.assert_allclose(mine, its, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    "content", [{}, {"batch_norm": "replica", "strategy": {"builder": "Mesh", "mesh": {"data": 2}}}], ids=str
)
def test_a_replica_has_its_own_examples(content: dict[str, Any], alone: Any) -> None:
    losses, _ = fitted(content)
    assert not np.allclose(losses, alone[0], rtol=1e-3)


def test_the_layer_is_not_changed() -> None:
    with AutoDist(resource_spec=ResourceSpec.from_dict({
        "nodes": [{"address": "localhost", "cpus": [0, 1]}], "batch_norm": "whole",
    })).scope():  # fmt: skip
        norm = layers.BatchNormalization()
        model = keras.Sequential([keras.Input((3,)), norm])
        model.compile("sgd", "mse")
        model.fit(X[:, 0, 0], X[:, 0, 0], batch_size=6, verbose=0)
    assert not norm.get_config()["synchronized"]
