"""Losses that index rows of the batch by constant positions are rejected by name, unless all rows are gathered."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
import tensorflow as tf

from autodist import AutoDist, ResourceSpec
from autodist.capture.batch_requirements import BatchDivision, require_no_rows_by_position
from autodist.capture.function import capture_function
from autodist.errors import CaptureError
from autodist.graph.step import Step

WEIGHT = tf.Variable(np.ones((3, 2)), name="weight", dtype=tf.float32)
LAST = tf.Variable(np.zeros(2), name="last", dtype=tf.float32, trainable=False)

Loss = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]


@cache
def item_of(loss_of: Loss) -> Step:
    """Returns a step on `y = x @ weight`, whose loss is the mean of `loss_of(y, x)`."""

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(loss_of(x @ WEIGHT, x))
        WEIGHT.assign_sub(0.1 * tape.gradient(loss, WEIGHT))
        return loss

    return capture_function(step, (tf.TensorSpec([None, 3]),), (0,)).step


def note_last(y: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    LAST.assign(y[-1])
    return y


REFUSED: dict[str, Loss] = {
    "y[2:]": lambda y, x: y[2:],
    "y[0:2]": lambda y, x: tf.reduce_mean(y[0:2] - 1.0) + tf.reduce_mean(y),
    "y[:-1]": lambda y, x: y[1:] - y[:-1],
    "y[0]": lambda y, x: y - y[0],
    "y[-1]": lambda y, x: y[-1],
    "y[2:n]": lambda y, x: y[2 : tf.shape(y)[0]],
    "y[1::4]": lambda y, x: y[5::4],
    "of the input": lambda y, x: tf.reduce_mean(y) * tf.reduce_sum(tf.sin(x[:2])),
    "without a gradient": lambda y, x: y * tf.stop_gradient(y[0]),
    "gather": lambda y, x: tf.gather(y, [0, 1]),
    "gather_nd": lambda y, x: tf.gather_nd(y, [[0, 1], [3, 0]]),
    "split": lambda y, x: tf.split(y, [2, tf.shape(y)[0] - 2])[1],
    "slice": lambda y, x: tf.slice(y, [0, 0], [2, -1]),
    "stacked": lambda y, x: tf.concat([y, x @ WEIGHT], 0)[:16],
    "flattened": lambda y, x: tf.reshape(y, [-1])[:16],
}
TAKEN: dict[str, Loss] = {
    "as it is": lambda y, x: y,
    "columns": lambda y, x: y[:, 0] + y[:, -1] + x[:, 1:][:, 0],
    "gathered columns": lambda y, x: tf.gather(y, [0, 1], axis=1) + tf.split(y, [1, 1], axis=1)[0],
    "its length": lambda y, x: y * tf.cast(tf.shape(x)[0], tf.float32),
    "the shape of a row": lambda y, x: y + tf.cast(tf.shape(tf.boolean_mask(x, x[:, 0] > 0)[:2])[1], tf.float32),
    "all by its length": lambda y, x: y[: tf.shape(x)[0]],
    "half": lambda y, x: tf.square(y[: tf.shape(x)[0] // 2]),
    "halves": lambda y, x: tf.split(y, 2)[0],
    "no more than there are": lambda y, x: y[:16],
    "at most": lambda y, x: tf.slice(tf.reshape(y, [-1]), [0], [32]),
    "every other": lambda y, x: y[::2] - y[1::2],
    "backwards": lambda y, x: y[::-1],
    "kept in a variable": note_last,
    "rows of a constant": lambda y, x: y + tf.constant(np.ones((4, 2)), tf.float32)[0],
    "rows of a weight": lambda y, x: y + WEIGHT[:1] + tf.gather(WEIGHT, [0, 1])[0],
    "shifted in time": lambda y, x: tf.transpose(tf.transpose(y)[1:] - tf.transpose(y)[:-1]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_loss_of_rows_that_constants_name_is_refused(name: str) -> None:
    with pytest.raises(CaptureError, match=r'test_rows_by_position.py:\d+\) takes rows.*batch_axis=\{"x": None\}'):
        require_no_rows_by_position(item_of(REFUSED[name]), BatchDivision(16, 2, 4, {"x:0": "x", "tensors_0:0": "x"}))


@pytest.mark.parametrize("name", TAKEN)
def test_other_rows_and_other_uses_go_on(name: str) -> None:
    require_no_rows_by_position(item_of(TAKEN[name]), BatchDivision(16, 2, 4))


def test_one_replica_takes_its_rows_by_position() -> None:
    require_no_rows_by_position(item_of(REFUSED["y[2:]"]), BatchDivision(16, 1, 1))


def test_a_row_that_is_returned_for_a_picture_goes_on() -> None:
    def step(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as tape:
            y = x @ WEIGHT
            loss = tf.reduce_mean(y)
        WEIGHT.assign_sub(0.1 * tape.gradient(loss, WEIGHT))
        return loss, y[0]

    require_no_rows_by_position(capture_function(step, (tf.TensorSpec([None, 3]),), (0,)).step, BatchDivision(16, 2, 4))


def replicas(count: int) -> AutoDist:
    node = {"address": "localhost", "cpus": list(range(count))}
    return AutoDist(resource_spec=ResourceSpec.from_dict({"nodes": [node]}))


POINTS = np.concatenate([[[-1.0], [1.0]], np.linspace(-1, 1, 18)[1:-1, None]])


def boundary_and_equation(y: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    """A loss of a network for a differential equation, whose boundary points are the first two rows."""
    return tf.add_n([tf.reduce_mean((y[2:] - tf.sin(x[2:])) ** 2), tf.reduce_mean((y[0:2] - 1.0) ** 2)])


@pytest.mark.parametrize("axes", [{}, {"batch_axis": {"x": None}}], ids=["gathered", "the mend"])
def test_a_step_trains_as_one_device(axes: dict[str, object]) -> None:
    def train(wrap: Callable[..., Callable[..., tf.Tensor]]) -> np.ndarray:
        w = tf.Variable(np.arange(8.0).reshape(1, 8) / 8)

        @wrap
        def step(x: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = boundary_and_equation(tf.reduce_sum(tf.tanh(x @ w), 1, keepdims=True), x)
            w.assign_sub(0.1 * tape.gradient(loss, w))
            return loss

        return np.append([float(step(tf.constant(POINTS))) for _ in range(3)], w.numpy())

    ad = replicas(2)
    with ad.scope():
        found = train(lambda step: ad.function(step, **axes))
    np.testing.assert_allclose(found, train(tf.function), rtol=1e-12)


def test_a_session_is_refused_with_the_name_of_its_placeholder() -> None:
    v1 = tf.compat.v1
    ad = replicas(2)
    with tf.Graph().as_default(), ad.scope():
        points = v1.placeholder(tf.float64, [None, 1], name="points")
        w = v1.get_variable("w", initializer=np.ones((1, 1)))
        train = v1.train.GradientDescentOptimizer(0.1).minimize(boundary_and_equation(tf.tanh(points @ w), points))
        with ad.create_distributed_session() as session:
            session.run(v1.global_variables_initializer())
            with pytest.raises(CaptureError, match=r'test_rows_by_position.*batch_axis=\{"points": None\}'):
                session.run(train, {points: POINTS})
