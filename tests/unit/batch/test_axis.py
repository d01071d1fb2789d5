"""Batch axes declared by the script: indexed as in NumPy, and rejected if an input has no such axis."""

from __future__ import annotations

import contextlib
import functools

import numpy as np
import pytest
import tensorflow as tf

from autodist import AutoDist
from autodist.errors import CaptureError
from autodist.resources import ResourceSpec

v1 = tf.compat.v1

X = np.arange(24.0).reshape(4, 6)
RATE = 2**-7  # exact in float32, the type of TF1's rate


def two_replicas() -> AutoDist:
    return AutoDist(resource_spec=ResourceSpec.from_dict({"nodes": [{"address": "localhost", "cpus": [0, 1]}]}))


def stepped(batch_axis, argument=X):
    """Returns a variable after one step on the sums of columns, with the second axis as the batch axis."""
    ad = two_replicas()
    with ad.scope():
        weight = tf.Variable(tf.ones([4, 1], tf.float64))

        @ad.function(batch_axis=batch_axis)
        def step(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.reduce_sum(weight * x, 0) ** 2)
            weight.assign_sub(RATE * tape.gradient(loss, weight))
            return loss

        loss = step(argument)
        return float(loss), weight.numpy()


@pytest.mark.feature("function", "data: another batch axis, or none")
@pytest.mark.parametrize("axis", [1, -1, np.int64(-1)])
def test_axes_of_a_function_are_counted_as_numpy_does(axis):
    loss, weight = stepped({"x": axis})
    sums = X.sum(0)
    assert loss == pytest.approx(np.mean(sums**2), rel=1e-12)
    np.testing.assert_allclose(weight, 1 - 2 * RATE * (X @ sums / 6)[:, None], rtol=1e-12)


@pytest.mark.parametrize(
    "axis, words",
    [
        (2, "batch_axis of x of step is 2, but x of step has 2 axes, -2 to 1; set it to the axis"),
        (-3, "batch_axis of x of step is -3, but x of step has 2 axes"),
        (True, "batch_axis of x of step is True, a bool; it must be an integer"),
        ("first", "batch_axis of x of step is 'first', a str; it must be an integer"),
        (1.0, "batch_axis of x of step is 1.0, a float"),
    ],
)
def test_axes_that_an_argument_does_not_have_are_refused(axis, words):
    with pytest.raises(CaptureError, match=words):
        stepped({"x": axis})


def test_an_axis_of_a_scalar_is_refused():
    with pytest.raises(
        CaptureError, match="batch_axis of x of step is 0, but x of step is a scalar, which has no axes"
    ):
        stepped({"x": 0}, np.float64(1))


@pytest.mark.parametrize("batch_axis", [1, "x", [("x", 1)]])
def test_an_argument_that_is_no_mapping_is_refused(batch_axis):
    with pytest.raises(CaptureError, match="it maps parameters to axes, such as {'x': 1}"):
        stepped(batch_axis)


def test_an_unknown_parameter_is_refused():
    with pytest.raises(CaptureError, match="batch_axis names 3, y, and step has the parameters x"):
        stepped({"y": 0, 3: 0})


def test_a_step_without_a_name_of_its_own_is_taken():
    ad = AutoDist()
    step = ad.function(functools.partial(lambda x, factor: x * factor, factor=2.0), batch_axis={"x": -1})
    assert step(np.float64([1, 2])).numpy().tolist() == [2, 4]


@contextlib.contextmanager
def graph(shape):
    ad = two_replicas()
    with tf.Graph().as_default(), ad.scope():
        x = v1.placeholder(tf.float64, shape, "x")
        weight = v1.get_variable("weight", [4, 1], tf.float64, v1.ones_initializer())
        loss = tf.reduce_mean(tf.reduce_sum(weight * x, 0) ** 2)
        train = v1.train.GradientDescentOptimizer(RATE).minimize(loss)
        yield ad, x, weight, loss, train


@pytest.mark.feature("session", "data: another batch axis, or none")
@pytest.mark.parametrize("shape", [(4, None), None])
@pytest.mark.parametrize("axis", [1, -1])
def test_axes_of_a_placeholder_are_counted_as_numpy_does(axis, shape):
    with graph(shape) as (ad, x, weight, loss, train):
        session = ad.create_distributed_session(batch_axis={"x": axis})
        session.run(v1.global_variables_initializer())
        assert session.run([loss, train], {x: X})[0] == pytest.approx(np.mean(X.sum(0) ** 2), rel=1e-12)
        np.testing.assert_allclose(session.run(weight), 1 - 2 * RATE * (X @ X.sum(0) / 6)[:, None], rtol=1e-12)


@pytest.mark.parametrize(
    "batch_axis, words",
    [
        ({"x": 2}, "batch_axis of x:0 is 2, but x:0 has 2 axes"),
        ({"x": True}, "batch_axis of x:0 is True, a bool"),
        ({"y": 0}, "batch_axis names 'y', which is no tensor of the session's graph"),
        ({3: 0}, "batch_axis names 3, which is no tensor"),
        (1, "batch_axis is 1; it maps placeholders to axes"),
    ],
)
def test_axes_that_a_placeholder_does_not_have_are_refused(batch_axis, words):
    with graph((4, None)) as (ad, *_), pytest.raises(CaptureError, match=words):
        ad.create_distributed_session(batch_axis=batch_axis)


def test_an_axis_of_an_unknown_rank_is_refused_where_it_is_fed():
    with graph(None) as (ad, x, _, loss, train):
        session = ad.create_distributed_session(batch_axis={x: 2})
        session.run(v1.global_variables_initializer())
        with pytest.raises(CaptureError, match="batch_axis of x:0 is 2, but x:0 has 2 axes"):
            session.run([loss, train], {x: X})
