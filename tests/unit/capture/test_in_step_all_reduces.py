"""In-step all-reduces are recorded at the point of the step that requests them."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from autodist.capture.function import CapturedFunction, capture_function
from autodist.errors import CaptureError
from autodist.graph.in_step_all_reduce import InStepAllReduce, InStepAllReduceKind, find_depths


def captured(layer: keras.layers.Layer) -> CapturedFunction:
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(4), layer, keras.layers.Dense(1)])
    optimizer = keras.optimizers.Adam()
    optimizer.build(model.trainable_variables)

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x, training=True) ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    return capture_function(step, (tf.TensorSpec([None, 3]),), [0])


def test_sums_of_gradients_are_none() -> None:
    assert not captured(keras.layers.BatchNormalization()).step.in_step_all_reduces


def test_a_layer_asks_for_sums_and_their_gradients() -> None:
    step = captured(keras.layers.BatchNormalization(synchronized=True)).step
    nodes = [s.node for s in step.in_step_all_reduces if s.of is None]
    assert len(nodes) == 3
    assert {s.of for s in step.in_step_all_reduces if s.of is not None} == set(nodes[:2])
    assert not any(s.is_mean for s in step.in_step_all_reduces)


def test_gradients_are_exchanged_after_the_loss() -> None:
    step = captured(keras.layers.BatchNormalization(synchronized=True)).step
    depths = find_depths(step)
    assert {depths[s.node] for s in step.in_step_all_reduces if s.of is None} == {1}
    assert depths[step.gradient_calls[0].seed] == 2
    assert {depths[s.node] for s in step.in_step_all_reduces if s.of is not None} == {3}


def test_means_and_nests() -> None:
    w = tf.Variable(np.ones(3, np.float32))

    def step(x: tf.Tensor) -> tf.Tensor:
        context = tf.distribute.get_replica_context()
        with tf.GradientTape() as tape:
            both = context.all_reduce(tf.distribute.ReduceOp.MEAN, {"a": x, "b": [w]})
            loss = tf.reduce_mean(both["a"] * both["b"][0])
        w.assign_sub(tape.gradient(loss, w))
        return loss

    item = capture_function(step, (tf.TensorSpec([None, 3]),), [0]).step
    first, *rest = item.in_step_all_reduces
    assert first == InStepAllReduce(first.node, None, is_mean=True)
    assert all(s.is_mean for s in rest)


def test_gathered_rows_and_their_gradients() -> None:
    w = tf.Variable(np.ones(3, np.float32))

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            rows = tf.distribute.get_replica_context().all_gather([tf.transpose(x * w)], axis=-1)[0]
            loss = tf.reduce_mean(rows**2)
        w.assign_sub(tape.gradient(loss, w))
        return loss

    item = capture_function(step, (tf.TensorSpec([None, 3]),), [0]).step
    first, second = item.in_step_all_reduces
    assert first == InStepAllReduce(first.node, how=InStepAllReduceKind.ROWS, axis=1)
    assert second == InStepAllReduce(second.node, first.node, how=InStepAllReduceKind.OWN_ROWS, axis=1)
    assert find_depths(item)[second.node] == 3


def test_an_axis_that_rows_do_not_have_is_refused() -> None:
    def step(x: tf.Tensor) -> tf.Tensor:
        return tf.distribute.get_replica_context().all_gather(x, axis=2)

    with pytest.raises(CaptureError, match=r"all_gather cannot gather x:0 of shape \(None, 3\) along axis 2"):
        capture_function(step, (tf.TensorSpec([None, 3], name="x"),), [0])


def test_all_is_as_it_was_afterwards() -> None:
    def patched() -> tuple[object, ...]:
        context = tf.distribute.ReplicaContext
        return context.all_reduce, context.all_gather, keras.layers.BatchNormalization._moments

    before = patched()
    captured(keras.layers.BatchNormalization(synchronized=True))
    assert patched() == before
