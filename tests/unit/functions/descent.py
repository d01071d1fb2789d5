"""A step of gradient descent under `ad.function`, and its result on one device."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from autodist import AutoDist, ResourceSpec

BATCHES = np.random.default_rng(0).normal(size=(3, 7, 2))


def autodist(replicas: int = 2) -> AutoDist:
    node = {"address": "localhost", "cpus": list(range(replicas))}
    return AutoDist(resource_spec=ResourceSpec.from_dict({"nodes": [node]}))


def descend(weight, x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(x @ weight))
    weight.assign_sub(0.1 * tape.gradient(loss, weight))
    return loss


def expected(value, batches=BATCHES):
    """The losses, and the weight at last, of one device."""
    weight = tf.Variable(value)
    return [float(descend(weight, x)) for x in batches], weight.numpy()


def assert_trains(step, weight, batches=BATCHES):
    wanted = expected(weight.numpy(), batches)
    np.testing.assert_allclose([float(step(x)) for x in batches], wanted[0], rtol=1e-12)
    np.testing.assert_allclose(weight.numpy(), wanted[1], rtol=1e-12)
