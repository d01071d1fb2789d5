"""A step with dense gradients only."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf


def dense_step(optimizer):
    """Two matrices, float64."""
    rng = np.random.default_rng(0)
    first, second = (keras.Variable(rng.normal(size=shape), name=f"weight_{shape[0]}") for shape in ((4, 5), (5, 3)))
    optimizer.build([first, second])

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.tanh(x @ first.value) @ second.value))
        gradients = tape.gradient(loss, [first.value, second.value])
        optimizer.apply_gradients(zip(gradients, [first, second], strict=True))
        return loss

    return step
