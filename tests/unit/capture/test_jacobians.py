"""Jacobians in a step, which TensorFlow optimizes as it runs it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from autodist import AutoDist, ResourceSpec


def train(wrap: Callable[..., Any]) -> np.ndarray:
    weight = tf.Variable(np.random.default_rng(0).normal(size=(3, 2)))

    @wrap
    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                made = tf.tanh(x @ weight)
            found = inner.batch_jacobian(made, x)
            loss = tf.reduce_mean(made**2) + tf.reduce_mean(tf.reduce_sum(found**2, [1, 2]))
        weight.assign_sub(0.1 * tape.gradient(loss, weight))
        return loss

    losses = [float(step(np.random.default_rng(n).normal(size=(n, 3)))) for n in (6, 5)]
    return np.append(losses, weight.numpy())


def test_training_by_jacobians_of_examples_equals_one_device() -> None:
    alone = train(tf.function)
    ad = AutoDist(resource_spec=ResourceSpec.from_dict({"nodes": [{"address": "localhost", "cpus": [0, 1]}]}))
    with ad.scope():
        np.testing.assert_allclose(train(ad.function), alone, rtol=1e-9)
