"""Functions that remain calls in a captured step: those of saved models, and those of forward-mode derivatives."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tests.unit.kernels.in_one_process import assert_same, capture, one_device, plan, train


def batches(*sizes):
    rng = np.random.default_rng(0)
    return [(rng.normal(size=(n, 3)), rng.integers(0, 5, n)) for n in sizes]


def test_a_table_that_a_called_function_looks_up_may_be_trained_as_a_whole():
    """Its gradient function returns the number of the table's rows in addition to the batch's rows."""
    weight, table = (tf.Variable(np.linspace(-1, 1, 3 * n).reshape(n, 3), name=f"of_{n}") for n in (3, 5))
    model = tf.function(lambda x, ids: tf.tanh(x @ weight) * tf.gather(table, ids)).get_concrete_function(
        tf.TensorSpec([None, 3], tf.float64), tf.TensorSpec([None], tf.int64)
    )

    def step(x, ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, ids) - 1))
        for variable, gradient in zip([weight, table], tape.gradient(loss, [weight, table]), strict=True):
            variable.assign_sub(0.1 * tf.convert_to_tensor(gradient))
        return loss

    captured = capture(step, *batches(6)[0])
    assert captured.step.graph_index.of_op("PartitionedCall") or captured.step.graph_index.of_op(
        "StatefulPartitionedCall"
    )
    fed = batches(6, 5, 1)
    assert_same(train(captured, plan(captured.step, 2, 2), fed), one_device(captured, step, fed))


@pytest.mark.parametrize("shape", [(1, 2), (2, 2)], ids=lambda s: f"{s[0]}x{s[1]}")
def test_a_loss_may_have_derivatives_that_were_taken_forwards(shape):
    weight = tf.Variable(np.linspace(-1, 1, 9).reshape(3, 3), name="weight")

    def step(x, _):
        with tf.GradientTape() as tape:
            with tf.autodiff.ForwardAccumulator(x, tf.ones_like(x)) as forwards:
                made = tf.tanh(x @ weight)
            loss = tf.reduce_mean(tf.square(made)) + tf.reduce_mean(tf.square(forwards.jvp(made)))
        weight.assign_sub(0.1 * tape.gradient(loss, weight))
        return loss

    captured, fed = capture(step, *batches(6)[0]), batches(6, 5, 1)
    assert_same(train(captured, plan(captured.step, *shape), fed), one_device(captured, step, fed))


def test_a_loss_may_have_derivatives_of_derivatives_that_were_taken_forwards():
    weight = tf.Variable(np.linspace(-1, 1, 9).reshape(3, 3), name="weight")

    def step(x, _):
        with tf.GradientTape() as tape:
            with tf.autodiff.ForwardAccumulator(x, tf.ones_like(x)) as outer:
                with tf.autodiff.ForwardAccumulator(x, tf.ones_like(x)) as inner:
                    made = tf.tanh(x @ weight)
                first = inner.jvp(made)
            loss = tf.reduce_mean(tf.square(first)) + tf.reduce_mean(tf.square(outer.jvp(first)))
        weight.assign_sub(0.1 * tape.gradient(loss, weight))
        return loss

    captured, fed = capture(step, *batches(6)[0]), batches(6, 5, 1)
    assert_same(train(captured, plan(captured.step, 2, 2), fed), one_device(captured, tf.function(step), fed))
