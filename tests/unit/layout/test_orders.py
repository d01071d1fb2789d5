"""Kinds if examples of a shard are permuted or selected by index: pairs mix examples, sums and means are unaffected."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from autodist.layout import Elements, Mean, PerExample, Sum, Unknown
from tests.unit.layout.batches import MEAN, SIZES, tensor
from tests.unit.layout.graphs import Case

WIDTH = 3


@pytest.fixture
def case():
    """Vectors `x` and `y`, and classes `label`."""
    built = Case()
    with built.graph.as_default():
        built.batch("x", WIDTH)
        built.batch("y", WIDTH)
        built.batch("label", dtype=tf.int64)
        yield built


@pytest.fixture
def feeds():
    rng = np.random.default_rng(4)
    x, y = rng.normal(size=(2, sum(SIZES), WIDTH))
    return {"x": x, "y": y, "label": rng.integers(0, 3, sum(SIZES))}


def numbers(x):
    return tf.range(tf.shape(x)[0])


def by(order):
    return lambda x: tf.gather(x, order(numbers(x)))


ORDERS = {
    "reversed": lambda x: tf.reverse(x, [0]),
    "sliced backwards": lambda x: x[::-1],
    "rolled": lambda x: tf.roll(x, 2, 0),
    "shuffled": tf.random.shuffle,
    "by shuffled numbers": by(tf.random.shuffle),
    "by the order of draws": by(lambda n: tf.argsort(tf.random.uniform(tf.shape(n)))),
    "shuffled back": by(lambda n: tf.math.invert_permutation(tf.random.shuffle(n))),
}
every_order = pytest.mark.parametrize("order", [pytest.param(order, id=name) for name, order in ORDERS.items()])


@every_order
def test_sums_and_means_are_those_of_any_order(case, feeds, order):
    moved = order(tensor(case, "x"))
    assert case.assert_joins([tf.reduce_mean(moved), tf.reduce_sum(moved)], feeds, SIZES) == [MEAN, Sum()]
    assert isinstance(case.kind(moved), Unknown)


@every_order
def test_pairs_are_mixed(case, order):
    x, y = tensor(case, "x"), tensor(case, "y")
    moved = order(y)
    pairs = [x * moved, tf.concat([x, moved], 1), tf.stack([moved, x], 1), tf.einsum("bi,bi->b", moved, x)]
    kinds = [case.kind(tf.reduce_mean(pair)) for pair in pairs]
    assert kinds == [MEAN] * len(pairs)
    assert all(kind.mixed_at for kind in kinds)


def test_what_changes_places_alike_is_not_mixed(case, feeds):
    x, y = tensor(case, "x"), tensor(case, "y")
    order = tf.random.shuffle(numbers(x))
    alike = [tf.gather(x, order) * tf.gather(y, order), x[::-1] * y[::-1], tf.roll(x, 1, 0) * tf.roll(y, 1, 0)]
    kinds = case.assert_joins([tf.reduce_mean(value) for value in alike], feeds, SIZES)
    assert kinds == [MEAN] * len(alike)
    assert not any(kind.mixed_at for kind in kinds)
    others = tf.random.shuffle(x) * tf.random.shuffle(y)
    assert case.kind(tf.reduce_mean(others)).mixed_at


UNKNOWN = {
    "some of a shuffled batch": lambda x, y, label: tf.gather(x, tf.random.shuffle(numbers(x))[:2]),
    "the order of a choice": lambda x, y, label: tf.gather(
        tf.boolean_mask(x, label > 1), tf.random.shuffle(numbers(x))
    ),
    "sorted batch": lambda x, y, label: tf.sort(x[:, 0]),
    "numbers beside others": lambda x, y, label: tf.gather(x, tf.where(label > 1)[:, 0] - 1),
    "half": lambda x, y, label: tf.slice(x, [0, 0], [tf.shape(x)[0] // 2, 2]),
    "all but one": lambda x, y, label: tf.slice(x, [0, 0], [tf.shape(x)[0] - 1, 2]),
    "as often as there are examples": lambda x, y, label: tf.tile(x, [1, tf.shape(x)[0]]),
    "segments of examples by position": lambda x, y, label: tf.math.unsorted_segment_sum(x, [0, 1, 0, 1, 0, 1, 0], 2),
    "put by others' positions": lambda x, y, label: tf.tensor_scatter_nd_update(
        tf.boolean_mask(x, label > 0), tf.where(label > 1), tf.boolean_mask(y, label > 1)
    ),
    "different masks": lambda x, y, label: tf.boolean_mask(x, label > 1) * tf.boolean_mask(y, label > 0),
}


@pytest.mark.parametrize("stitch", [tf.dynamic_stitch, tf.raw_ops.ParallelDynamicStitch], ids=["one", "parallel"])
def test_what_is_made_of_each_class_and_put_back_is_rows(case, feeds, stitch):
    x, label = tensor(case, "x"), tf.cast(tensor(case, "label"), tf.int32)
    put = stitch(indices=divided(numbers(x), label), data=[k * part for k, part in enumerate(divided(x, label), 1)])
    flat = tf.reshape(x, [-1])
    of_each = tf.reshape(tf.tile(label[:, None], [1, WIDTH]), [-1])
    looked_up = stitch(indices=divided(tf.range(tf.size(flat)), of_each), data=divided(flat, of_each))
    found = [put, tf.reduce_mean(put * tensor(case, "y")), tf.reduce_sum(looked_up)]
    assert case.assert_joins(found, feeds, SIZES) == [PerExample(0), MEAN, Sum()]


@pytest.mark.parametrize("indices, data", [([0, 1], [0, 1]), ([0, 2, 1], [0, 2, 1]), ([0, 1, 2], [0, 2, 1])])
def test_some_classes_or_those_of_another_order_are_not_put_back(case, indices, data):
    x, label = tensor(case, "x"), tf.cast(tensor(case, "label"), tf.int32)
    parts, places = divided(x, label), divided(numbers(x), label)
    put = tf.dynamic_stitch([places[k] for k in indices], [parts[k] for k in data])
    assert isinstance(case.kind(tf.reduce_mean(put)), Unknown)


def divided(values, classes):
    return tf.dynamic_partition(values, classes, 3)


@pytest.mark.parametrize("made", [pytest.param(made, id=name) for name, made in UNKNOWN.items()])
def test_what_depends_on_positions_in_the_part_is_unknown(case, made):
    value = made(tensor(case, "x"), tensor(case, "y"), tensor(case, "label"))
    assert isinstance(case.kind(tf.reduce_mean(value)), Unknown)


def test_rows_of_different_things_are_counted_together(case, feeds):
    x, label = tensor(case, "x"), tensor(case, "label")
    both = tf.concat([tf.boolean_mask(x, label > 0), x], 0)
    kinds = case.assert_joins([tf.reduce_mean(both), tf.reduce_sum(both)], feeds, SIZES)
    assert kinds == [Mean(Elements("concat:0")), Sum()]
    assert isinstance(case.kind(both), Unknown)
    assert isinstance(case.kind(tf.reduce_mean(both * tf.concat([x, tf.boolean_mask(x, label > 0)], 0))), Unknown)


def joined_parts(x, y, masked):
    """Yields the parts of batches one behind the other, selected by their lengths, each with the batch that it is."""
    n, m = tf.shape(x)[0], tf.shape(masked)[0]
    three, unlike = tf.concat([x, y, x + y], 0), tf.concat([x, masked, y], 0)
    yield from [(three[:n], x), (three[n : 2 * n], y), (three[n + n :], x + y), (three[3 * n - n :], x + y)]
    yield from zip(tf.split(three[n:], 2), [y, x + y], strict=True)
    yield from zip(tf.split(three, [n, n, n]), [x, y, x + y], strict=True)
    yield from [
        (tf.slice(three, [n, 0], [n, WIDTH]), y),
        (tf.slice(three, [n, 0], [-1, WIDTH]), tf.concat([y, x + y], 0)),
    ]
    yield from [
        (unlike[:n], x),
        (unlike[n:], tf.concat([masked, y], 0)),
        (tf.nn.relu(unlike)[n:][:m], tf.nn.relu(masked)),
    ]


def test_parts_of_joined_batches_are_the_batches_again(case, feeds):
    x, y = tensor(case, "x"), tensor(case, "y")
    masked = tf.boolean_mask(y, tensor(case, "label") > 0)
    pairs = list(joined_parts(x, y, masked))
    kinds = case.assert_joins([tf.reduce_sum(part * batch) for part, batch in pairs], feeds, SIZES)
    assert kinds == [Sum()] * len(pairs)
    assert not any(kind.mixed_at for kind in kinds)
    means = [tf.reduce_mean(part) for part, _ in pairs]
    assert not any(isinstance(kind, Unknown) for kind in case.assert_joins(means, feeds, SIZES))


def test_rows_up_to_another_length_are_no_part(case):
    x, y = tensor(case, "x"), tensor(case, "y")
    n, m = tf.shape(x)[0], tf.shape(tf.boolean_mask(y, tensor(case, "label") > 0))[0]
    two = tf.concat([x, y], 0)
    assert all(
        isinstance(case.kind(rows), Unknown)
        for rows in [two[:m], two[m:], two[1:], two[n // 2 : n], *tf.split(two, [m, 2 * n - m])]
    )


def test_labels_joined_like_their_batches_match_them(case, feeds):
    x, y = tensor(case, "x"), tensor(case, "y")
    masked = tf.boolean_mask(y, tensor(case, "label") > 0)
    of = [tf.ones_like(x), tf.zeros_like(masked)]
    loss = tf.reduce_mean(tf.square(tf.concat([x, masked], 0) - tf.concat(of, 0)))
    [kind] = case.assert_joins([loss], feeds, SIZES)
    assert isinstance(kind, Mean)
    assert not kind.mixed_at
