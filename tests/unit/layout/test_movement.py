"""Kinds of moved, gathered and filled tensors: the position of the batch axis."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from autodist.layout import PerExample, Sum, Unknown
from tests.unit.layout.batches import MEAN, check, reason, tensor


def test_broadcasting_counts_axes_from_the_right(case, feeds):
    x, s = tensor(case, "x"), tensor(case, "s")
    row = tf.reduce_sum(x, 1)
    check(
        case,
        feeds,
        [
            (s * tf.constant([1.0, 2, 3, 4], tf.float64), PerExample(0)),
            (row[:, None] * x, PerExample(0)),
            (row[None, :] * tf.ones([2, 1], tf.float64), PerExample(1)),
            (s * row[:, None, None], PerExample(0)),
        ],
    )
    assert "different axes" in reason(case, row - row[:, None])
    assert "positions in the batch" in reason(case, row * tf.constant(np.arange(7.0)))


def test_layout(case, feeds):
    x, s = tensor(case, "x"), tensor(case, "s")
    n, t = tf.shape(s)[0], tf.shape(s)[1]
    flat = tf.reshape(s, [-1, 4])
    check(
        case,
        feeds,
        [
            (flat, PerExample(0)),
            (tf.reshape(flat, [-1, t, 4]), PerExample(0)),
            (tf.reshape(flat, [n, t, 4]), PerExample(0)),
            (tf.reshape(s, [n, -1]), PerExample(0)),
            (tf.reshape(x, [n, tf.size(x) // n]), PerExample(0)),
            (tf.tile(x, [1, tf.size(x) // n]), PerExample(0)),
            (tf.reshape(x, [1, -1, 3]), PerExample(1)),
            (tf.transpose(s, [1, 0, 2]), PerExample(1)),
            (tf.expand_dims(x, 0), PerExample(1)),
            (tf.expand_dims(x, -1), PerExample(0)),
            (tf.squeeze(tf.expand_dims(x, 0), 0), PerExample(0)),
            (s[:, 0], PerExample(0)),
            (s[..., 1:3], PerExample(0)),
            (s[:, ::-1, tf.newaxis, 2], PerExample(0)),
            (tf.slice(x, [0, 1], [-1, 2]), PerExample(0)),
            (tf.pad(x, [[0, 0], [1, 2]]), PerExample(0)),
            (tf.math.exp(tf.pad(x, [[0, 0], [1, 2]], constant_values=-np.inf)), PerExample(0)),
            (tf.pad(x, [[0, 0], [1, 2]], constant_values=np.nan), PerExample(0)),
            (tf.tile(x, [1, 2]), PerExample(0)),
            (tf.repeat(x, 2, 1), PerExample(0)),
            (tf.reverse(x, [1]), PerExample(0)),
            (tf.cumsum(x, 1), PerExample(0)),
            (tf.concat([x, x], 1), PerExample(0)),
            (tf.stack([x, x]), PerExample(1)),
            (tf.unstack(x, axis=1)[2], PerExample(0)),
            (tf.split(x, [1, 2], 1)[1], PerExample(0)),
        ],
    )


def test_a_time_major_batch_is_flattened_and_restored(case, feeds):
    x, weights = tensor(case, "x"), tf.constant(np.arange(12.0).reshape(3, 4))
    n, times = tf.shape(x)[0], tf.constant(np.arange(1.0, 6), tf.float64)
    sequences = times[:, None, None] * x[None]
    flat = tf.reshape(sequences, [-1, 3]) @ weights
    restored = tf.reshape(flat, [5, n, 4])
    check(
        case,
        feeds,
        [
            (sequences, PerExample(1)),
            (restored, PerExample(1)),
            (tf.reshape(tf.reshape(sequences, [-1]), [5, -1, 3]), PerExample(1)),
            (tf.reshape(tf.reshape(sequences, [-1]), [5, -1]), PerExample(1)),
            (restored * sequences[..., :1], PerExample(1)),
            (tf.reduce_mean(flat), MEAN),
            (tf.reduce_mean(tf.square(restored)), MEAN),
        ],
    )
    assert "merges the batch axis" in reason(case, tf.reshape(flat, [4, -1, 5]))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x[0],
        lambda x: x[1:],
        lambda x: x[::-1],
        lambda x: tf.slice(x, [1, 0], [-1, -1]),
        lambda x: tf.pad(x, [[0, 1], [0, 0]]),
        lambda x: tf.tile(x, [2, 1]),
        lambda x: tf.cumsum(x, 0),
        lambda x: tf.reverse(x, [0]),
        lambda x: tf.gather(x, [0]),
        lambda x: tf.nn.softmax(x, axis=0),
        lambda x: tf.sort(x, axis=0),
        lambda x: tf.matmul(x, x, transpose_b=True),
        lambda x: tf.reshape(x, [3, -1]),
        lambda x: tf.range(tf.shape(x)[0]),
        lambda x: tf.argmax(x, 0),
        lambda x: tf.concat([x, tf.ones([1, 3], tf.float64)], 0),
        lambda x: tf.squeeze(tf.where(x[:, 0] > 1), 1),
    ],
)
def test_what_looks_at_positions_in_the_batch_is_unknown(case, function):
    assert isinstance(case.kind(function(tensor(case, "x"))), Unknown)


def test_batches_behind_one_another_keep_sums_and_means(case, feeds):
    x, s = tensor(case, "x"), tensor(case, "s")
    both = tf.concat([x, 2 * x], 0)
    labels = tf.concat([tf.ones_like(x), tf.zeros_like(x)], 0)
    check(
        case,
        feeds,
        [
            (tf.reduce_mean(tf.square(both - labels)), MEAN),
            (tf.split(tf.tanh(both), 2)[1], PerExample(0)),
        ],
    )
    assert "not in their order" in case.kind(both).reason
    doubled = tf.reshape(s[:, :2, :3], [-1, 3])
    assert isinstance(case.kind(both * doubled), Unknown)


def test_lookups(case, feeds):
    x, y = tensor(case, "x"), tensor(case, "y")
    table = tf.compat.v1.get_variable("table", initializer=np.eye(3), use_resource=True)
    check(
        case,
        feeds,
        [
            (tf.gather(table, y), PerExample(0)),
            (tf.nn.embedding_lookup(table, y), PerExample(0)),
            (tf.gather(table, y, axis=1), PerExample(1)),
            (tf.gather(x, [2, 0], axis=1), PerExample(0)),
            (tf.gather(x, y, axis=1, batch_dims=1), PerExample(0)),
            (tf.gather_nd(table, tf.stack([y, y], 1)), PerExample(0)),
            (tf.one_hot(y, 3), PerExample(0)),
            (tf.one_hot(y, 3, axis=0), PerExample(1)),
            (tf.math.unsorted_segment_sum(x, y, 3), Sum()),
        ],
    )
    assert isinstance(case.kind(tf.gather(tf.reduce_sum(x, 0), y)), Unknown)


def test_losses_of_one_op(case, feeds):
    x, y = tensor(case, "x"), tensor(case, "y")
    rows = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=x)
    check(
        case,
        feeds,
        [
            (rows, PerExample(0)),
            (
                tf.nn.softmax_cross_entropy_with_logits(labels=tf.one_hot(y, 3, dtype=tf.float64), logits=x),
                PerExample(0),
            ),
            (tf.reduce_mean(tf.cast(tf.equal(tf.argmax(x, 1), y), tf.float64)), MEAN),
            (tf.reduce_mean(tf.cast(tf.math.in_top_k(y, tf.cast(x, tf.float32), 2), tf.float64)), MEAN),
            (tf.nn.log_softmax(x), PerExample(0)),
        ],
    )


def test_shapes_that_hold_the_batch_make_rows(case, feeds):
    x = tensor(case, "x")
    n = tf.shape(x)[0]
    open_shape = tf.reshape(x, tf.pad(tf.shape(x), [[0, 0]]))  # as tensorflow-probability pads shapes
    check(
        case,
        feeds,
        [
            (tf.broadcast_to(x, tf.broadcast_dynamic_shape(tf.shape(open_shape), [1, x.shape[-1]])), PerExample(0)),
            (tf.broadcast_to(open_shape, tf.broadcast_dynamic_shape([1, 1], tf.shape(open_shape))), PerExample(0)),
            (tf.zeros([n, 2]), PerExample(0)),
            (tf.zeros(tf.concat([tf.expand_dims(n, 0), [2]], 0)), PerExample(0)),
            (tf.fill([tf.squeeze(tf.shape(x)[:1], 0), 2], 1.0), PerExample(0)),
            (tf.fill([3, n], 2.0), PerExample(1)),
            (tf.ones_like(x), PerExample(0)),
            (tf.broadcast_to(tf.constant([1.0, 2.0]), [n, 2]), PerExample(0)),
            (tf.tile(tf.constant([[1.0, 2.0]]), [n, 1]), PerExample(0)),
        ],
    )
    assert case.kind(tf.random.uniform(tf.shape(x))) == PerExample(0)
