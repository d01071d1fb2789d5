"""Losses divided by a count that may be zero on a replica whose examples contribute all the same, as in detection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from autodist import AutoDist, ResourceSpec

v1 = tf.compat.v1
Loss = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]


def total(each: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(each)


LOSSES: dict[str, Loss] = {
    "a quotient": lambda each, positive: total(each) / total(positive),
    "at least one": lambda each, positive: total(each) / tf.maximum(total(positive), 1),
    "by a product": lambda each, positive: total(each) * (1 / total(positive)),
    "0 without positives": lambda each, positive: tf.math.divide_no_nan(total(each), total(positive)),
    "a guarded divisor": lambda each, positive: (
        total(each) / tf.where(total(positive) == 0, tf.ones_like(total(positive)), total(positive))
    ),
    "a guarded quotient": lambda each, positive: tf.where(
        total(positive) > 0, tf.math.divide_no_nan(total(each), total(positive)), 0
    ),
    "counted": lambda each, positive: total(each) / tf.cast(tf.maximum(tf.math.count_nonzero(positive), 1), tf.float64),
    "selected rows": lambda each, positive: (
        total(each) / tf.cast(tf.maximum(tf.shape(tf.where(positive > 0))[0], 1), tf.float64)
    ),
    "each example divided": lambda each, positive: total(tf.reduce_sum(each, 1) / tf.maximum(total(positive), 1)),
    "beside a masked mean": lambda each, positive: (
        total(each) / tf.maximum(total(positive), 1) + total(each * positive) / tf.maximum(total(positive), 1)
    ),
    "masked": lambda each, positive: total(each * positive) / tf.maximum(total(positive), 1),
}
BATCHES = [12, 11, 12]


def data(size: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns examples without positives in the first half of the batch."""
    x = np.random.default_rng(0).normal(size=(size, 5))
    return x, np.where(np.arange(size)[:, None] > 6, np.abs(x[:, :3]) > 0.3, False).astype(float)


def each_of(x: tf.Tensor, labels: tf.Tensor, weight: Any) -> tf.Tensor:
    found = tf.sigmoid(x @ weight)
    return -labels * tf.math.log(found) - (1 - labels) * found**2 * tf.math.log(1 - found)


def numbers() -> np.ndarray:
    return np.random.default_rng(1).normal(size=(5, 3)) / 3


def replicas() -> AutoDist:
    return AutoDist(resource_spec=ResourceSpec.from_dict({"nodes": [{"address": "localhost", "cpus": [0, 1]}]}))


def of_steps(wrap: Callable[..., Any], loss_of: Loss) -> np.ndarray:
    weight = tf.Variable(numbers())

    @wrap
    def step(x: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = loss_of(each_of(x, labels, weight), labels)
        weight.assign_sub(0.1 * tape.gradient(loss, weight))
        return loss, tf.maximum(total(labels), 1)

    losses = [[float(value) for value in step(*data(size))] for size in BATCHES]
    return np.append(losses, weight.numpy())


def of_session(make_session: Callable[[], Any], loss_of: Loss) -> np.ndarray:
    weight = v1.get_variable("weight", initializer=numbers())
    x, labels = (v1.placeholder(tf.float64, [None, width], name) for width, name in ((5, "x"), (3, "labels")))
    loss = loss_of(each_of(x, labels, weight), labels)
    train = v1.train.GradientDescentOptimizer(0.1).minimize(loss)
    with make_session() as session:
        session.run(v1.global_variables_initializer())
        losses = [session.run([loss, train], dict(zip([x, labels], data(size), strict=True)))[0] for size in BATCHES]
        return np.append(losses, session.run(weight))


IN_SESSIONS = ("at least one", "0 without positives", "selected rows")


@pytest.mark.parametrize("loss", [name for name in LOSSES if name not in IN_SESSIONS])
def test_steps_equal_one_device(loss: str) -> None:
    alone = of_steps(tf.function, LOSSES[loss])
    ad = replicas()
    with ad.scope():
        np.testing.assert_allclose(of_steps(ad.function, LOSSES[loss]), alone, rtol=1e-9)


@pytest.mark.parametrize("loss", IN_SESSIONS)
def test_sessions_equal_one_device(loss: str) -> None:
    with tf.Graph().as_default():
        alone = of_session(v1.Session, LOSSES[loss])
    ad = replicas()
    with tf.Graph().as_default(), ad.scope():
        np.testing.assert_allclose(of_session(ad.create_distributed_session, LOSSES[loss]), alone, rtol=1e-9)
