"""Steps that fit only one batch length are rejected by each front end before any process is started."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from autodist import AutoDist, ResourceSpec
from autodist.errors import CaptureError
from autodist.runs.run import Run

v1 = tf.compat.v1
X, Y = np.ones((16, 5, 4), np.float32), np.ones((16, 3), np.float32)


class StartedError(Exception):
    """A run is about to start."""


@pytest.fixture(autouse=True)
def no_start(monkeypatch):
    def start(run):
        raise StartedError

    monkeypatch.setattr(Run, "start", start)


def autodist(replicas=2, workers=1):
    node = {"address": "localhost", "cpus": list(range(replicas)), "workers": workers}
    return AutoDist(resource_spec=ResourceSpec.from_dict({"nodes": [node]}))


TWO = [(2, 1), (2, 2)]


def fit(ad, *layers, **size):
    with ad.scope():
        model = keras.Sequential([keras.Input(**size), *layers, keras.layers.Dense(3)])
        model.compile("sgd", "mse")
        model.fit(X, Y, batch_size=8, epochs=1, verbose=0)


def stateful(layer):
    return layer(2, stateful=True)


@pytest.mark.feature("fit", "model: stateful recurrent layers", refused="CaptureError")
@pytest.mark.parametrize(
    "layer, shape",
    [
        (keras.layers.LSTM, (2, 1)), (keras.layers.GRU, (2, 2)), (keras.layers.SimpleRNN, (2, 1)),
    ],
)  # fmt: skip
def test_fit_refuses_a_stateful_rnn_and_names_its_state(layer, shape):
    with pytest.raises(CaptureError, match=r"takes 8 examples.*\(data\).*rnn_state.* \[8, 2\].*no stateful RNN"):
        fit(autodist(*shape), stateful(layer), batch_shape=(8, 5, 4))


BY_SIZE, BY_SHAPE = {"shape": (5, 4), "batch_size": 8}, {"batch_shape": (8, 5, 4)}


@pytest.mark.parametrize(
    "layer, size, shape",
    [
        (lambda: keras.layers.LSTM(2), BY_SIZE, (2, 2)),
        (keras.layers.Flatten, BY_SIZE, (2, 1)),
        (lambda: keras.layers.Reshape((20,)), BY_SHAPE, (2, 1)),
    ],
)  # fmt: skip
def test_fit_takes_a_model_whose_input_alone_has_a_batch_size(layer, size, shape):
    with pytest.raises(StartedError):
        fit(autodist(*shape), layer(), **size)


@pytest.mark.feature("fit", "data: steps for one number of examples alone", refused="CaptureError")
@pytest.mark.parametrize("shape", TWO)
def test_fit_refuses_a_reshape_to_a_batch_of_one_length(shape):
    with pytest.raises(CaptureError, match="takes 8 examples at a time"):
        fit(autodist(*shape), keras.layers.Lambda(lambda x: tf.reshape(x, [8, 20])), batch_shape=(8, 5, 4))


def test_fit_with_one_replica_takes_all_of_them():
    with pytest.raises(StartedError):
        fit(autodist(1), stateful(keras.layers.LSTM), batch_shape=(8, 5, 4))


def call(ad, change, **options):
    weight = tf.Variable(np.ones((4, 3)), dtype=tf.float32)

    @ad.function(**options)
    def step(features, labels):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(change(features) @ weight - labels))
        weight.assign_sub(0.1 * tape.gradient(loss, weight))
        return loss

    with ad.scope():
        step(X[:8, 0], Y[:8])


def eight(x):
    return tf.reshape(x, [8, -1])


@pytest.mark.feature("function", "data: steps for one number of examples alone", refused="CaptureError")
@pytest.mark.parametrize("shape, options", [((2, 1), {}), ((2, 1), {"batch": "global"}), ((2, 2), {"batch": "global"})])
def test_a_function_that_is_given_a_batch_to_divide_is_refused(shape, options):
    with pytest.raises(CaptureError, match=r"\(features, labels\)"):
        call(autodist(*shape), eight, **options)


@pytest.mark.parametrize("shape", [(1, 1), (2, 2)])
def test_a_function_whose_replica_gets_all_that_is_passed_goes_on(shape):
    with pytest.raises(StartedError):
        call(autodist(*shape), eight)


def test_the_length_of_an_open_axis_comes_with_the_mend():
    with pytest.raises(TypeError) as caught:
        call(autodist(1), lambda x: tf.reshape(x, [x.shape[0], -1]))
    assert any("tf.shape(x)[0]" in note for note in caught.value.__notes__)


def session(ad, shape, batch_axis=None):
    with tf.Graph().as_default(), ad.scope():
        x = v1.placeholder(tf.float32, shape, "x")
        v1.placeholder(tf.float32, [7], "unused")
        weight = v1.get_variable("weight", [4, 3])
        loss = tf.reduce_mean(tf.square(x @ weight))
        v1.train.GradientDescentOptimizer(0.1).minimize(loss)
        ad.create_distributed_session(batch_axis=batch_axis)


@pytest.mark.feature("session", "data: steps for one number of examples alone", refused="CaptureError")
@pytest.mark.parametrize("batch_axis", [None, {"x": 0}])
def test_a_session_refuses_a_placeholder_of_fixed_length(batch_axis):
    with pytest.raises(CaptureError, match=r"x:0 has the fixed shape \(8, 4\).* Leave .* axis open"):
        session(autodist(2), [8, 4], batch_axis)


@pytest.mark.parametrize(
    "replicas, shape, batch_axis", [(2, [None, 4], None), (1, [8, 4], None), (2, [8, 4], {"x": None})]
)
def test_a_session_takes_what_is_open_or_whole(replicas, shape, batch_axis):
    with pytest.raises(StartedError):
        session(autodist(replicas), shape, batch_axis)
