"""Shapes and dtypes of tensors after replication."""

from __future__ import annotations

import pytest
import tensorflow as tf

from autodist.capture.function import capture_function
from autodist.graph.step import ReplicatedStep
from autodist.graph.verify import verify
from autodist.kernels import KERNELS, Context, rewrite
from tests.unit.kernels.in_one_process import plan


def replicated(batch, workers, replicas):
    """The step of the first worker after `replicate`: a loss, its gradient, and rows, of batches of this length."""
    weight = tf.Variable(tf.ones([3, 2]), name="weight")

    def step(x):
        with tf.GradientTape() as tape:
            rows = tf.matmul(x, weight, name="rows")
            loss = tf.reduce_mean(rows, name="loss")
        weight.assign_sub(tape.gradient(loss, weight))
        return tf.transpose(rows, name="turned"), loss

    captured = capture_function(step, [tf.TensorSpec([batch, 3], tf.float32)], (0,)).step
    names = [kernel.name for kernel in KERNELS]
    kernels = KERNELS[: names.index("replicate") + 1]
    return rewrite(captured, Context(plan(captured, workers, replicas), 0), kernels=kernels)


@pytest.mark.parametrize(("workers", "replicas"), [(1, 2), (2, 1), (2, 2)])
@pytest.mark.parametrize("batch", [None, 8])
def test_every_copy_has_the_dtype_and_shape_of_its_part_of_the_batch(batch, workers, replicas):
    step = replicated(batch, workers, replicas)
    assert isinstance(step, ReplicatedStep) and step.copies
    verify(step)
    for copy, (_, captured) in step.copies.items():
        spec, known = step.spec_of(f"{copy}:0"), step.spec_of(f"{captured}:0")
        assert spec.dtype == known.dtype and spec.shape.is_compatible_with(known.shape)
    named = {captured for _, captured in step.copies.values()}
    for name, shape in {"rows": [None, 2], "turned": [2, None], "loss": []}.items():
        assert name in named
        assert step.spec_of(f"{name}:0") == tf.TensorSpec(shape, tf.float32)


def test_a_gradient_keeps_the_shape_of_its_variable():
    step = replicated(8, 2, 1)
    (variable,) = step.variables
    (pending,) = (one for one in step.reductions if one.variable == variable.name)
    assert pending.shape == tf.TensorShape(variable.shape)
