"""Rows of a sparse gradient that one device sums before an optimizer squares or clips them."""

from __future__ import annotations

import itertools
from functools import lru_cache

import keras
import numpy as np
import pytest
import tensorflow as tf

from autodist.errors import RewriteError
from tests.unit.kernels.in_one_process import assert_same, capture, one_device, plan, rewritten, train
from tests.unit.kernels.pairs import pairs
from tests.unit.kernels.table_steps import ROWS, WIDTH, repeated_ids
from tests.unit.kernels.test_optimizers_on_rows import LAYOUTS

optimizers = keras.optimizers

OPTIMIZERS = {
    "sgd": lambda: optimizers.SGD(0.1),
    "sgd, clipped by norm": lambda: optimizers.SGD(0.1, clipnorm=0.01),
    "sgd, clipped by global norm": lambda: optimizers.SGD(0.1, global_clipnorm=0.01),
    "adagrad": lambda: optimizers.Adagrad(0.1),
    "adam": lambda: optimizers.Adam(0.01),
}
INDICES = {
    "a constant": lambda x: tf.constant([2, 0, 5, 1]),
    "a constant that repeats": lambda x: tf.constant([2, 0, 2, 1]),
    "as long as the examples": lambda x: tf.range(tf.shape(x)[1]),
}


def positions_step(optimizer, indices):
    table = keras.Variable(np.random.default_rng(0).normal(size=(ROWS, WIDTH)), dtype="float64", name="table")
    optimizer.build([table])

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.sin(x + tf.gather(table.value, indices(x)))))
        optimizer.apply_gradients([(tape.gradient(loss, table.value), table)])
        return loss

    return capture(step, np.zeros((6, 4, WIDTH))), step


def lookup_step(optimizer, gather):
    """The step of `table_step`, with a mean over examples alone for its loss."""
    table = keras.Variable(np.random.default_rng(0).normal(size=(ROWS, WIDTH)), dtype="float64", name="table")
    optimizer.build([table])

    def step(ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.sin(gather(table.value, ids)) - 0.5))
        optimizer.apply_gradients([(tape.gradient(loss, table.value), table)])
        return loss

    return capture(step, np.zeros((4, 2), np.int32)), step


def gather_different(table, ids):
    different, places = tf.unique(tf.reshape(ids, [-1]))
    return tf.gather(tf.gather(table, different), places)


def gather_with_positions(table, ids):
    return tf.gather(table, ids) + tf.gather(table, tf.constant([7, 8]))


def gather_after_positions(table, ids):
    places = tf.concat([tf.constant([7, 8]), tf.reshape(ids, [-1])], 0)
    return tf.gather(table, places)[2:] * tf.gather(table, places)[:1]


def gather_twice_with_positions(table, ids):
    """Rows of examples, and of all replicas, each twice: as from two sampled losses on one table."""
    places = tf.concat([tf.reshape(ids, [-1]), tf.constant([7, 8])], 0)
    first, second = tf.gather(table, places), tf.gather(table, places)
    return first[:-2] * first[-1] + second[:-2] * second[-2]


def gather_different_with_positions(table, ids):
    return gather_different(table, ids) + tf.gather(table, tf.constant([7]))


def gather_counted(table, ids):
    different, places, _ = tf.unique_with_counts(tf.reshape(ids, [-1]))
    return tf.gather(tf.gather(table, different), places)


def gather_segments(table, ids):
    owners = tf.repeat(tf.range(tf.shape(ids)[0]), 2)
    return tf.sparse.segment_sum(table, tf.reshape(ids, [-1]), owners, sparse_gradient=True)


def batches(size):
    rng = np.random.default_rng(1)
    return [(rng.normal(size=(size, 4, WIDTH)),) for _ in range(3)]


@lru_cache(maxsize=1)  # for all layouts
def positions_on_one_device(optimizer, indices):
    captured, step = positions_step(OPTIMIZERS[optimizer](), INDICES[indices])
    return captured, one_device(captured, step, batches(6))


@lru_cache(maxsize=1)  # for all layouts
def lookup_on_one_device(optimizer, gather, count):
    captured, step = lookup_step(OPTIMIZERS[optimizer](), gather)
    return captured, one_device(captured, step, repeated_ids(3, count))


@pytest.mark.parametrize("optimizer, layout", pairs(OPTIMIZERS, LAYOUTS))
def test_training_equals_one_device(optimizer, layout):
    captured, alone = positions_on_one_device(optimizer, "as long as the examples")
    assert_same(train(captured, LAYOUTS[layout](captured.step), batches(6)), alone)


@pytest.mark.parametrize("indices, layout", pairs(INDICES, LAYOUTS))
def test_rows_join_in_order_for_any_indices(indices, layout):
    captured, alone = positions_on_one_device("adam", indices)
    assert_same(train(captured, LAYOUTS[layout](captured.step), batches(6)), alone)


def test_parts_of_unequal_length_and_none_at_all():
    captured, step = positions_step(optimizers.Adam(0.01), INDICES["a constant"])
    found = train(captured, plan(captured.step, 2, 2), batches(3))
    assert_same(found, one_device(captured, step, batches(3)))


LOOKUPS = [
    *itertools.product([gather_different], OPTIMIZERS),
    *itertools.product([gather_counted, gather_segments], ["sgd, clipped by global norm", "adam"]),
]


@pytest.mark.parametrize("lookup, layout", pairs(LOOKUPS, LAYOUTS))
def test_each_different_id_looked_up_once(lookup, layout):
    gather, optimizer = lookup
    captured, alone = lookup_on_one_device(optimizer, gather, 8)
    assert_same(train(captured, LAYOUTS[layout](captured.step), repeated_ids(3, 8)), alone)


@pytest.mark.parametrize("optimizer, layout", pairs(OPTIMIZERS, [name for name in LAYOUTS if "cut" not in name]))
def test_a_table_looked_up_for_examples_and_then_for_all(optimizer, layout):
    captured, alone = lookup_on_one_device(optimizer, gather_with_positions, 7)
    assert_same(train(captured, LAYOUTS[layout](captured.step), repeated_ids(3, 7)), alone)


@pytest.mark.feature(
    "function", "model: an embedding looked up by the batch's ids and by others, under Adam", refused="RewriteError"
)
@pytest.mark.parametrize(
    "gather", [gather_after_positions, gather_twice_with_positions, gather_different_with_positions]
)
def test_a_table_looked_up_in_two_ways_is_refused_where_rows_are_squared(gather):
    captured, _ = lookup_step(optimizers.Adam(0.01), gather)
    with pytest.raises(RewriteError, match="table is looked up in several ways.*convert_to_tensor"):
        rewritten(captured, plan(captured.step, 1, 2))


def test_a_table_in_shards_looked_up_in_two_ways_is_refused_where_rows_are_squared():
    captured, _ = lookup_step(optimizers.Adam(0.01), gather_with_positions)
    with pytest.raises(RewriteError, match="table is looked up in several ways.*leave it in one piece"):
        rewritten(captured, LAYOUTS["2 workers, cut over both"](captured.step))


def test_a_table_looked_up_in_two_ways_trains_where_rows_are_added():
    captured, step = lookup_step(optimizers.SGD(0.1), gather_with_positions)
    ids = repeated_ids(3, 8)
    found = train(captured, plan(captured.step, 2, 2), ids)
    assert_same(found, one_device(captured, step, ids))
