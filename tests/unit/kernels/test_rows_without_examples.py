"""Replicas without examples touch no rows of a table, despite the placeholder row that they compute with."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import tensorflow as tf

from autodist.batch.examples import rows_of, with_a_row
from autodist.placement.partitioning import Partitioning
from tests.unit.kernels import in_one_process
from tests.unit.kernels.in_one_process import assert_same, capture, one_device, plan, train
from tests.unit.kernels.pairs import pairs
from tests.unit.kernels.place.partition.shards import sharded_plan

ROWS = 7


def fed(x):
    return tf.cast(x[:, 0], tf.int64)


def sorted_by_the_step(x):
    return tf.argsort(x, axis=1)[:, 1:]


def counted_by_the_step(x):
    return tf.cast(tf.where(x > 3.5)[:, 1], tf.int32)


def from_a_table_of_ids(x):
    return tf.gather(tf.constant([5, 3, 6, 4, 0, 1, 2]), tf.cast(x[:, 0], tf.int32))


IDS = [fed, sorted_by_the_step, counted_by_the_step, from_a_table_of_ids]


def of_the_table(table, ids, loss_of):
    with tf.GradientTape() as tape:
        loss = loss_of(tf.gather(table, ids))
    return loss, tape.gradient(loss, table)


def by_hand(table, ids, loss_of):
    @tf.custom_gradient
    def look_up(whole):
        def gradient(upstream):
            return tf.IndexedSlices(tf.reshape(upstream, [-1, 2]), tf.reshape(ids, [-1]), tf.constant([ROWS, 2]))

        return tf.gather(whole, ids), gradient

    with tf.GradientTape() as tape:
        loss = loss_of(look_up(table.read_value()))
    return loss, tape.gradient(loss, table)


def of_two_gathers(table, ids, loss_of):
    with tf.GradientTape() as tape:
        loss = loss_of(tf.gather(table, ids)) + loss_of(tf.gather(table, (ids + 1) % ROWS))
    return loss, tape.gradient(loss, table)


def with_a_row_that_all_ask_for(table, ids, loss_of):
    with tf.GradientTape() as tape:
        loss = loss_of(tf.gather(table, ids)) + tf.reduce_sum(tf.gather(table, [1, 5]) ** 2)
    return loss, tape.gradient(loss, table)


GRADIENTS = [of_the_table, by_hand, of_two_gathers, with_a_row_that_all_ask_for]


def shrink_each_touched_row(table, gradient):
    """A step by gradient and then a proximal one, of each row that is touched, once."""
    ids, place = tf.unique(gradient.indices)
    rows = tf.math.unsorted_segment_sum(gradient.values, place, tf.size(ids))
    left = tf.gather(table, ids) - 0.1 * rows
    table.scatter_update(tf.IndexedSlices(left * 0.9, ids))


def count_each_touch(table, gradient):
    """A step by gradient that also adds something for each row of the gradient, as often as it comes."""
    table.scatter_sub(tf.IndexedSlices(0.1 * gradient.values + 0.01, gradient.indices))


UPDATES = [shrink_each_touched_row, count_each_touch]


LAYOUTS = {
    "3 replicas": lambda step: plan(step, 1, 3),
    "3 workers": lambda step: plan(step, 3, 1),
    "3 workers, server": lambda step: plan(step, 3, 1, {"table": 1}),
    "2 workers of 2, server": lambda step: plan(step, 2, 2, {"table": 0}),
    "2 workers of 2, in shards": lambda step: sharded_plan(step, {"table": Partitioning(0, (2, ROWS - 2))}, 2, 2),
    "2 workers of 2": lambda step: plan(step, 2, 2),
}

BATCHES = [
    (np.array([[4.0, 6.0, 1.0, 2.0]]),),
    (np.array([[3.0, 0.0, 4.0, 5.0], [6.0, 2.0, 5.0, 0.0]]),),
]
"""One example, and two."""


def rows_or_a_row_of_zeros(value, axis, share):
    """Returns the feed of a worker whose script feeds no examples: its rows, or one row of zeros."""
    return with_a_row(rows_of(value, axis, share), axis)


@cache
def captured_with(ids_of, gradient_of, update):
    table = tf.Variable(np.random.default_rng(0).normal(size=(ROWS, 2)), name="table")

    def step(x):
        loss, gradient = gradient_of(table, ids_of(x), lambda rows: tf.reduce_mean(tf.square(rows)))
        update(table, gradient)
        return loss

    captured = capture(step, np.zeros((4, 4)))
    return captured, one_device(captured, step, BATCHES)


CASES = [
    *((ids, of_the_table, shrink_each_touched_row) for ids in IDS),
    *((sorted_by_the_step, gradient, shrink_each_touched_row) for gradient in GRADIENTS[1:]),
    (counted_by_the_step, of_two_gathers, count_each_touch),
    (fed, of_the_table, count_each_touch),
]


@pytest.mark.parametrize("case, layout", pairs(CASES, LAYOUTS))
def test_a_replica_without_an_example_touches_no_row(case, layout, monkeypatch):
    monkeypatch.setattr(in_one_process, "take", rows_or_a_row_of_zeros)
    captured, alone = captured_with(*case)
    assert_same(train(captured, LAYOUTS[layout](captured.step), BATCHES), alone)
