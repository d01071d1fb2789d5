"""Sums and means in losses of sessions are the whole batch's; a layer's own stay local, and all others are reported."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from autodist import AutoDist, ResourceSpec
from autodist.errors import RewriteError
from tests.equivalence.cases.base import Alone

v1 = tf.compat.v1

ROWS = np.random.default_rng(0).normal(3.0, 2.0, (5, 3))
_HALF = np.random.default_rng(1).normal(size=(4, 3))
SAME_MOMENTS = np.concatenate([_HALF, _HALF[::-1]])
"""The parts of two replicas have the same moments, so that a layer normalises by those of the whole."""

Build = Callable[[tf.Tensor, tf.Variable], tuple[tf.Tensor, tf.Operation]]


def minimized(loss: Callable[[tf.Tensor, tf.Tensor], tf.Tensor]) -> Build:
    def build(x: tf.Tensor, weight: tf.Variable) -> tuple[tf.Tensor, tf.Operation]:
        value = loss(tf.tanh(tf.tensordot(x, weight, 1)), x)
        return value, v1.train.AdamOptimizer(0.1).minimize(value)

    return build


def deviation(made: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    return tf.reduce_mean(tf.square(made)) + tf.math.reduce_std(made)


def by_a_layer(made: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    layer = tf_keras.layers.BatchNormalization(dtype="float64")
    return tf.reduce_mean(tf.square(layer(made, training=True) - x[:, :2]))


def by_a_tape(x: tf.Tensor, weight: tf.Variable) -> tuple[tf.Tensor, tf.Operation]:
    with tf.GradientTape() as tape:
        loss = deviation(tf.tanh(x @ weight), x)
    gradient = tape.gradient(loss, weight)
    return loss, v1.train.GradientDescentOptimizer(0.1).apply_gradients([(gradient, weight)])


def train(
    ad: Any,
    build: Build,
    *batches: np.ndarray,
    shape: Any = (None, 3),
    batch_axis: Mapping[str, int] | None = None,
) -> list[np.ndarray]:
    """The loss of each step, and the weight in the end."""
    with tf.Graph().as_default(), ad.scope():
        x = v1.placeholder(tf.float64, shape, "x")
        weight = v1.get_variable("weight", initializer=np.random.default_rng(2).normal(size=(3, 2)))
        loss, update = build(x, weight)
        with ad.create_distributed_session(**({"batch_axis": batch_axis} if batch_axis else {})) as session:
            session.run(v1.global_variables_initializer())
            found = [session.run([loss, update], {x: batch})[0] for batch in batches]
            return [*found, session.run(loss, {x: batches[0]}), session.run(weight)]


def autodist(cpus: int = 2) -> AutoDist:
    nodes = [{"address": "localhost", "cpus": list(range(cpus))}]
    return AutoDist(resource_spec=ResourceSpec.from_dict({"nodes": nodes}))


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "autodist" and r.levelno >= logging.WARNING]


@pytest.mark.parametrize("rows", [5, 2], ids=["uneven", "one a replica"])
def test_a_deviation_in_a_loss_is_that_of_the_whole_batch(rows: int, caplog: pytest.LogCaptureFixture) -> None:
    batches, build = [ROWS[:rows], ROWS[-rows:]], minimized(deviation)
    for found, expected in zip(train(autodist(), build, *batches), train(Alone(), build, *batches), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-10)
    assert not warnings(caplog)


def test_a_layer_of_batch_normalisation_sees_its_replica_s_part_and_a_deviation_beside_it_the_whole_batch(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "autodist")
    build = minimized(lambda made, x: by_a_layer(made, x) + tf.math.reduce_std(made[:, 0] * x[:, 0]))
    found, expected = (train(ad, build, SAME_MOMENTS) for ad in (autodist(), Alone()))
    np.testing.assert_allclose(found[-1], expected[-1], rtol=1e-10)
    told = [message for message in caplog.messages if "they are those of the whole batch" in message]
    assert len(told) == 1 and "batch_normalization" not in told[0] and not warnings(caplog)
    assert any("each sees only those of its own replica" in message for message in caplog.messages)


def test_a_layer_of_batch_normalisation_alone_exchanges_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "autodist")
    train(autodist(), minimized(by_a_layer), SAME_MOMENTS)
    assert not any("they are those of the whole batch" in message for message in caplog.messages)


def test_one_replica_exchanges_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "autodist")
    train(autodist(cpus=1), minimized(deviation), ROWS)
    assert not any("whole batch" in message for message in caplog.messages)


def test_an_earlier_record_of_a_tape_is_named_with_its_line(caplog: pytest.LogCaptureFixture) -> None:
    train(autodist(), by_a_tape, ROWS)
    assert [
        "each replica takes those of its own examples" in message and "test_global_statistics.py" in message
        for message in warnings(caplog)
    ] == [True]


def scaled_backwards(made: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    size = tf.sqrt(tf.reduce_mean(tf.square(x)))
    reversed_gradient = tf.custom_gradient(lambda z: (tf.identity(z), lambda upstream: -size * upstream))
    return tf.reduce_mean(tf.square(reversed_gradient(made) - 1.0))


def test_statistics_that_only_scale_gradients_are_named_with_their_line(caplog: pytest.LogCaptureFixture) -> None:
    train(autodist(), minimized(scaled_backwards), ROWS)
    assert [
        "gradients are combined with sums, means" in message and "test_global_statistics.py" in message
        for message in warnings(caplog)
    ] == [True]


def test_a_batch_along_another_axis_than_the_first_open_one_is_refused() -> None:
    build = minimized(lambda made, x: deviation(tf.reduce_mean(made, 2), x))
    with pytest.raises(RewriteError, match="assumed to lie along the first axis that its placeholder leaves open"):
        train(autodist(), build, np.stack([ROWS] * 2), shape=(None, None, 3), batch_axis={"x": 1})
