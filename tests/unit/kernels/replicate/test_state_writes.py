"""Variables that the compute part writes several times in a step, with parts of the step between that run once."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf

from autodist.capture.function import CapturedFunction
from tests.unit.kernels.in_one_process import assert_same, capture, one_device, plan, train
from tests.unit.kernels.pairs import pairs
from tests.unit.kernels.place.partition.shards import numbers

Made = tuple[CapturedFunction, Callable[..., object]]


def sharpness_aware(between: str) -> Made:
    """Two gradients, the second at weights moved by the first (SAM), a running average, and a metric.

    Args:
        between: the node between the two writes that runs once: "result" of the metric, "average" that the first update
            reads, "stale" for a write that starts from the value read at the beginning.
    """
    weight = tf.Variable(numbers(0, 3, 2), name="weight")
    average = tf.Variable(np.zeros(2), trainable=False, name="average")
    total, count = (tf.Variable(np.float64(0), trainable=False, name=name) for name in ("total", "count"))

    def loss_and_gradient(x: tf.Tensor, y: tf.Tensor, found: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as tape:
            out = x @ weight
            average.assign(0.9 * found + 0.1 * tf.reduce_mean(out, 0))
            loss = tf.reduce_mean(tf.square(out - y))
        total.assign_add(loss * tf.cast(tf.shape(x)[0], tf.float64))
        count.assign_add(tf.cast(tf.shape(x)[0], tf.float64))
        return loss, tape.gradient(loss, weight)

    def step(x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, ...]:
        at_first = average.read_value()
        loss, gradient = loss_and_gradient(x, y, at_first)
        result = total / count if between == "result" else tf.reduce_sum(average)
        away = 0.05 * gradient / tf.norm(gradient)
        if between == "average":
            away *= 1.0 + tf.norm(average)
        weight.assign_add(away)
        found = at_first if between == "stale" else average.read_value()
        moved, gradient = loss_and_gradient(x, y, found)
        weight.assign_sub(away)
        weight.assign_sub(0.1 * gradient)
        return loss, moved, result, total / count

    return capture(step, numbers(0, 6, 3), numbers(0, 6, 2)), step


LAYOUTS: dict[str, Callable[[CapturedFunction], object]] = {
    "1 worker": lambda captured: plan(captured.step, 1, 2),
    "AllReduce": lambda captured: plan(captured.step, 2, 1),
    "PS": lambda captured: plan(captured.step, 2, 2, {"weight": 1}),
}


@pytest.mark.parametrize("between, layout", pairs(["result", "average", "stale"], LAYOUTS))
def test_writes_around_what_runs_once_equal_one_device(between: str, layout: str):
    captured, step = sharpness_aware(between)
    batches = [(numbers(k, 6, 3), numbers(k + 9, 6, 2)) for k in range(3)]
    found = train(captured, LAYOUTS[layout](captured), batches)
    assert_same(found, one_device(captured, step, batches))


def with_centres(lookup: Callable[[tf.Variable, tf.Tensor], tf.Tensor]) -> Made:
    """A centre loss: it compares features with the rows of a table that the step has just written."""
    weight = tf.Variable(numbers(0, 3, 2), name="weight")
    centres = tf.Variable(np.zeros((4, 2)), trainable=False, name="centres")

    def step(x: tf.Tensor, label: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            features = tf.tanh(x @ weight)
            one_hot = tf.one_hot(label, 4, dtype=x.dtype)
            away = tf.matmul(one_hot, lookup(centres, label) - features, transpose_a=True)
            centres.assign(centres - 0.5 * away / (tf.reduce_sum(one_hot, 0)[:, tf.newaxis] + 1.0))
            loss = tf.reduce_mean(tf.reduce_sum(tf.square(features - lookup(centres, label)), 1))
        weight.assign_sub(0.1 * tape.gradient(loss, weight))
        return loss

    return capture(step, numbers(0, 6, 3), np.zeros(6, np.int32), is_split=True), step


LOOKUPS: dict[str, Callable[..., tf.Tensor]] = {
    "of a variable": tf.gather,
    "of its value": lambda table, ids: tf.gather(table.read_value(), ids),
}


@pytest.mark.parametrize("lookup, layout", pairs(LOOKUPS, LAYOUTS))
def test_rows_are_read_again_after_the_write_of_their_table(lookup: str, layout: str):
    """A gather of the value (as of a variable of Keras) becomes one of the variable, and its node `…/axis` stays."""
    captured, step = with_centres(LOOKUPS[lookup])
    batches = [(numbers(k, 6, 3), np.arange(k, k + 6, dtype=np.int32) % 4) for k in range(3)]
    found = train(captured, LAYOUTS[layout](captured), batches)
    assert_same(found, one_device(captured, step, batches))
