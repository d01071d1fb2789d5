"""A step with variables of many types and shapes, used here in one process and elsewhere by real workers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import tensorflow as tf

CLOSE = {tf.float64: 1e-12, tf.float32: 2e-6, tf.float16: 4e-3, tf.bfloat16: 3e-2}
"""Tolerances for the difference of many devices from one, after few steps, by the type of a variable."""


def make_odd_step(rate: float = 0.05) -> tuple[Callable[..., object], list[tf.Variable]]:
    """A step of examples (float64, n × 6) whose loss is a mean, and all its variables."""
    rng = np.random.default_rng(4)

    def variable(name: str, dtype: tf.DType, *shape: int, trainable: bool = True) -> tf.Variable:
        return tf.Variable(tf.cast(0.5 * rng.normal(size=shape), dtype), name=name, trainable=trainable)

    single = variable("single", tf.float32, 6, 5)
    double = variable("double", tf.float64, 6, 4)
    half, brain = variable("half", tf.float16, 4), variable("brain", tf.bfloat16, 7, 4)
    scalar, half_scalar = variable("scalar", tf.float64), variable("half_scalar", tf.float16)
    empty, empty_matrix = variable("empty", tf.float32, 0), variable("empty_matrix", tf.float64, 0, 4)
    untouched = variable("untouched", tf.float32, 4, trainable=False)
    unused = variable("unused", tf.float32, 9)
    trained = [single, double, half, brain, scalar, half_scalar, empty, empty_matrix, unused]

    def step(x: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            hidden = tf.tanh(x @ double)
            gain = tf.cast(half, tf.float64) + tf.cast(tf.reduce_mean(brain, 0), tf.float64)
            hidden = hidden * gain * scalar + tf.cast(half_scalar, tf.float64) + tf.cast(untouched, tf.float64)
            nothing = tf.cast(tf.reduce_sum(empty), tf.float64) + tf.reduce_sum(empty_matrix)
            # Separately, since the rounding of a float32 product over examples depends on the processor's order.
            apart = tf.reduce_mean(tf.square(tf.cast(x, tf.float32) @ single - 1.0))
            loss = tf.reduce_mean(tf.square(hidden - 1.0)) + tf.cast(apart, tf.float64) + nothing
        for v, gradient in zip(trained, tape.gradient(loss, trained), strict=True):
            if gradient is not None:
                v.assign_sub(tf.cast(rate, gradient.dtype) * gradient)

    return step, [*trained, untouched]


def odd_batches() -> list[tuple[np.ndarray]]:
    """Uneven ones, the last with fewer examples than workers."""
    return [(np.random.default_rng(n).normal(size=(n, 6)),) for n in (7, 5, 1)]
