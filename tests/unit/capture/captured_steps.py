"""Steps to capture, and queries on them."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from autodist.capture.function import capture_function

X = tf.TensorSpec([None, 4], tf.float32)
OUTSIDE = tf.Variable(np.ones((4, 2), np.float32), name="outside")


def captured(step, *specs):
    specs = specs or (X,)
    return capture_function(step, specs, [0 if s.shape.rank else None for s in specs])


def plain_step(x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(x @ OUTSIDE))
    OUTSIDE.assign_sub(0.1 * tape.gradient(loss, OUTSIDE))
    return loss


def names(found):
    return [g.variable for g in found.step.gradients]


def ops(found):
    return {n.op for n in found.step.graph_def.node}
