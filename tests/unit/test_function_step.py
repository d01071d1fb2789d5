"""`ad.function`: what it asks of the step that it captures."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from autodist import AutoDist, ResourceSpec, function_step
from autodist.errors import EmptyBatchError


@pytest.mark.parametrize("asked, found", [({}, False), ({"jit_compile": True}, True), ({"jit_compile": None}, False)])
def test_the_captured_step_says_whether_xla_is_asked_for(monkeypatch, asked, found):
    class SeenError(Exception):
        pass

    def prepare(run, item, sources, shapes, tables):
        raise SeenError(item.jit_compile)

    monkeypatch.setattr(function_step, "prepare", prepare)
    ad = AutoDist()
    with ad.scope():
        weight = tf.Variable(1.0)

        @ad.function(**asked)
        def step(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(x * weight)
            weight.assign_sub(tape.gradient(loss, weight))

    with pytest.raises(SeenError) as seen:
        step(np.ones(3, np.float32))
    assert seen.value.args == (found,)


SPARSE = tf.SparseTensor([[0, 1], [2, 0]], [3.0, 4.0], [3, 2])
RAGGED = tf.RaggedTensor.from_row_lengths([3.0, 4.0], [0, 2, 0])


@pytest.mark.parametrize("value", [SPARSE, RAGGED])
def test_what_is_sparse_is_given_whole_where_that_is_said(value):
    ad = AutoDist()
    with ad.scope():
        weight = tf.Variable(1.0)

        @ad.function(batch_axis={"features": None})
        def step(features):
            with tf.GradientTape() as tape:
                loss = weight * tf.reduce_sum(features.values)
            weight.assign_sub(tape.gradient(loss, weight) * 0.0)
            return loss

        assert [float(step(value)), float(step(value.with_values(value.values * 2.0)))] == [7, 14]
    assert len(step._traced) == 1


@pytest.mark.feature("function", "evaluation: steps that only evaluate")
def test_functions_that_train_and_evaluate_take_turns():
    """What only evaluates reads what the steps before have trained, and shares the batch out among the replicas."""
    ad = AutoDist(resource_spec=ResourceSpec.from_dict({"nodes": [{"address": "localhost", "cpus": [0, 1, 2]}]}))
    x = np.random.default_rng(0).normal(size=(7, 2))
    expected = np.ones((2, 1))
    with ad.scope():
        weight = tf.Variable(expected)
        seen = tf.Variable(0, trainable=False, dtype=tf.int64)

        @ad.function
        def train(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(x @ weight))
            weight.assign_sub(0.1 * tape.gradient(loss, weight))

        @ad.function
        def evaluate(x):
            seen.assign_add(tf.shape(x, out_type=tf.int64)[0])
            return x @ weight, tf.reduce_sum(x @ weight)

    for step in range(3):
        rows, total = evaluate(x)
        np.testing.assert_allclose(rows, x @ expected, rtol=1e-12)
        np.testing.assert_allclose(total, np.sum(x @ expected), rtol=1e-12)
        assert int(seen) == 7 * (step + 1)
        train(x[:5])
        expected = expected - 0.2 * x[:5].T @ (x[:5] @ expected) / 5


@pytest.mark.feature("function", "data: batches without examples", refused="EmptyBatchError")
def test_a_batch_without_examples_is_refused():
    ad = AutoDist(resource_spec=ResourceSpec.from_dict({"nodes": [{"address": "localhost", "cpus": [0, 1]}]}))
    with ad.scope():
        weight = tf.Variable(np.ones((2, 1)))

        @ad.function
        def train(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(x @ weight))
            weight.assign_sub(0.1 * tape.gradient(loss, weight))
            return loss

    with pytest.raises(EmptyBatchError, match="no examples at all"):
        train(np.ones((0, 2)))
    assert float(train(np.ones((1, 2)))) == 4.0
