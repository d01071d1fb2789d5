"""Kinds in steps that build sparse tensors from the batch, look up distinct ids, or sum by segments."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from autodist.layout import Elements, Mean, PerExample, Unknown
from tests.unit.layout.batches import MEAN, SIZES, reason, tensor
from tests.unit.layout.graphs import Case

IDS, WIDTH, LENGTH = 9, 3, 4
COMBINERS = ["sum", "mean", "sqrtn"]


@pytest.fixture
def case():
    """Lists of `ids`, padded with 0, and numbers `y`."""
    built = Case()
    with built.graph.as_default():
        built.batch("ids", LENGTH, dtype=tf.int64)
        built.batch("y")
        yield built


@pytest.fixture
def feeds():
    ids = np.random.default_rng(6).integers(1, IDS, (7, LENGTH))
    ids[1, 2:], ids[4], ids[6, 0] = 0, 0, 0
    return {"ids": ids, "y": np.arange(7.0)}


def table():
    return tf.constant(np.random.default_rng(0).normal(size=(IDS, WIDTH)))


def sparse(case):
    return tf.sparse.from_dense(tensor(case, "ids"))


def flat(case):
    return tf.reshape(tensor(case, "ids"), [-1])


def owners(case):
    """Returns the row index of the example for each id."""
    return tf.repeat(tf.range(tf.shape(tensor(case, "ids"))[0]), LENGTH)


def assert_rows(case, feeds, rows):
    """Asserts rows of examples, and the kind of a loss of them and of other data of the examples."""
    loss = tf.reduce_mean(tf.square(tf.reduce_sum(rows, -1) - tensor(case, "y")))
    assert case.assert_joins([rows, loss], feeds, SIZES) == [PerExample(0), MEAN]


@pytest.mark.parametrize("combiner", COMBINERS)
@pytest.mark.parametrize("weighted", [False, True])
def test_lookups_that_give_every_example_a_row(case, feeds, combiner, weighted):
    ids = sparse(case)
    weights = ids.with_values(tf.cast(ids.values, tf.float64) - 2) if weighted else None
    assert_rows(case, feeds, tf.nn.safe_embedding_lookup_sparse([table()], ids, weights, combiner))


def test_numbers_of_examples_that_are_stacked_beside_columns(case, feeds):
    ids = tensor(case, "ids")
    at = tf.where(tf.not_equal(ids, 0))
    indices = tf.stack([at[:, 0], tf.gather_nd(ids, at)], axis=1)
    shape = tf.stack([tf.shape(ids, tf.int64)[0], IDS])
    one_each = tf.SparseTensor(indices, tf.cast(at[:, 1], tf.float64), shape)
    assert_rows(case, feeds, tf.sparse.sparse_dense_matmul(one_each, table()))


@pytest.mark.parametrize("combiner", COMBINERS)
def test_lookups_of_tensorflow_1(case, feeds, combiner):
    rows = tf.compat.v1.nn.safe_embedding_lookup_sparse([table()], sparse(case), combiner=combiner, default_id=3)
    assert_rows(case, feeds, rows)


@pytest.mark.parametrize("combiner", COMBINERS)
def test_lookups_that_leave_out_the_last_examples_say_so(case, combiner):
    rows = tf.nn.embedding_lookup_sparse(table(), sparse(case), None, combiner=combiner)
    assert "safe_embedding_lookup_sparse" in reason(case, rows)


@pytest.mark.parametrize("cross", [tf.sparse.cross_hashed, tf.sparse.cross])
def test_crossed_columns(case, feeds, cross):
    ids = tensor(case, "ids")
    crossed = cross([ids[:, :2], tf.cast(tf.expand_dims(tensor(case, "y"), 1), tf.int64)])
    if cross is tf.sparse.cross:
        crossed = crossed.with_values(tf.strings.length(crossed.values))
    assert_rows(case, feeds, tf.cast(tf.sparse.to_dense(crossed), tf.float64))


def test_crosses_of_sparse_columns_are_unknown(case):
    crossed = tf.sparse.cross_hashed([sparse(case), tensor(case, "ids")])
    assert "it crosses sparse tensors" in reason(case, crossed.values)


def test_a_sparse_tensor_and_back(case, feeds):
    ids = sparse(case)
    dense = tf.sparse.to_dense(ids.with_values(tf.gather(tf.range(IDS, dtype=tf.float64), ids.values)))
    product = tf.sparse.sparse_dense_matmul(ids.with_values(tf.cast(ids.values, tf.float64)), table()[:LENGTH])
    for rows in (dense, product):
        assert_rows(case, feeds, rows)


def test_what_entries_hold(case, feeds):
    ids = sparse(case)
    of_examples = tf.gather(tensor(case, "y"), ids.indices[:, 0])
    kinds = case.assert_joins([ids.values, of_examples, ids.indices[:, 1]], feeds, SIZES)
    assert kinds == [PerExample(0)] * 3
    kind = case.assert_joins([tf.reduce_mean(of_examples)], feeds, SIZES)[0]
    assert isinstance(kind, Mean)
    assert isinstance(kind.weight, Elements)
    assert isinstance(case.kind(ids.indices), Unknown)
    assert isinstance(case.kind(ids.indices[:, 0]), Unknown)


def test_entries_that_stand_elsewhere_than_their_examples_are_unknown(case):
    ids = sparse(case)
    y = tensor(case, "y")
    unknown = [
        tf.sparse.to_dense(tf.sparse.transpose(ids)),
        tf.sparse.to_dense(tf.sparse.reshape(ids, [-1])),
        tf.scatter_nd(ids.indices, ids.values, tf.shape(tf.concat([y, y], 0), out_type=tf.int64)[:1] * [1, LENGTH]),
        tf.math.unsorted_segment_sum(tf.gather(table(), ids.values), ids.indices[:, 1], LENGTH + tf.size(y)),
        tf.gather(tf.reshape(tensor(case, "ids"), [-1]), tf.where(y > 2)[:, 0]),
    ]
    for value in unknown:
        assert isinstance(case.kind(value), Unknown), value


@pytest.mark.parametrize("name", ["sum", "mean", "max", "min", "prod", "sqrt_n"])
def test_segments_that_are_examples(case, feeds, name):
    values = tf.gather(table(), flat(case))
    number = tf.shape(tensor(case, "y"))[0]
    assert_rows(case, feeds, getattr(tf.math, f"unsorted_segment_{name}")(values, owners(case), number))
    if name != "sqrt_n":
        assert_rows(case, feeds, getattr(tf.math, f"segment_{name}")(values, owners(case)))


def test_segments_of_segments_are_of_examples_only_where_each_has_one(case):
    ids = sparse(case)
    told = reason(case, tf.math.segment_sum(tf.gather(table(), ids.values), ids.indices[:, 0]))
    assert "unsorted_segment_sum" in told


def test_each_different_id_looked_up_once(case, feeds):
    for unique in (tf.unique, lambda ids: tf.unique_with_counts(ids)[:2]):
        different, places = unique(flat(case))
        rows = tf.gather(2.0 * tf.tanh(tf.gather(table(), different)), tf.reshape(places, [-1, LENGTH]))
        assert_rows(case, feeds, tf.reduce_sum(rows, 1))
        assert isinstance(case.kind(different), Unknown)
        assert isinstance(case.kind(places), Unknown)
        assert isinstance(case.kind(tf.reduce_sum(tf.gather(table(), different))), Unknown)
    _, others = tf.unique(tf.reshape(tensor(case, "ids")[:, ::-1], [-1]))
    assert isinstance(case.kind(tf.gather(tf.gather(table(), different), others)), Unknown)


def test_a_loss_of_connected_classes_with_sparse_labels(case, feeds):
    labels = tf.cast(
        tf.sparse.from_dense(tf.maximum(tensor(case, "ids") - 4, tf.constant([1, 0, 0, 0], tf.int64))), tf.int32
    )
    given = tf.tile(tf.gather(tf.cast(table(), tf.float32), tensor(case, "ids")), [1, 3, 4])
    length = tf.fill([tf.shape(given)[0]], 3 * LENGTH)
    v1 = tf.compat.v1.nn.ctc_loss(labels, given, length, time_major=False)
    v2 = tf.nn.ctc_loss(labels, tf.transpose(given, [1, 0, 2]), None, length, blank_index=-1)
    losses = [v1, tf.reduce_mean(v1), v2, tf.reduce_mean(v2)]
    assert case.assert_joins(losses, feeds, SIZES, rtol=1e-5) == [PerExample(0), MEAN] * 2


def test_a_vector_with_the_length_of_other_rows_is_counted_as_these(case, feeds):
    ids, y = tensor(case, "ids"), tensor(case, "y")
    positive, others = tf.boolean_mask(ids, ids > 0), tf.boolean_mask(ids + 1, ids >= 1)
    paired = tf.reshape(others, tf.shape(positive))
    kinds = case.assert_joins([positive * paired, tf.reduce_mean(tf.cast(positive * paired, tf.float64))], feeds, SIZES)
    assert kinds[0] == PerExample(0)
    assert isinstance(kinds[1], Mean) and isinstance(kinds[1].weight, Elements)
    for unpaired in (
        tf.reshape(others, [tf.shape(positive)[0], 1]),
        tf.reshape(others, tf.shape(tf.concat([positive, positive], 0))),
        positive * others,
        tf.reshape(tf.reverse(others, [0]), tf.shape(positive)) * positive,
        tf.reshape(tf.concat([y, y], 0), tf.shape(positive)),
    ):
        assert isinstance(case.kind(unpaired), Unknown), unpaired


def ragged(case):
    """Returns the ragged tensor of the ids, as a step has it."""
    ids = tensor(case, "ids")
    at = tf.where(tf.not_equal(ids, 0))
    rows = tf.shape(ids, tf.int64)[0]
    return tf.RaggedTensor.from_value_rowids(tf.gather_nd(ids, at), at[:, 0], nrows=rows, validate=False)


def test_the_lengths_of_ragged_rows(case, feeds):
    ids = ragged(case)
    lengths = tf.cast(ids.row_lengths(), tf.float64)
    assert_rows(case, feeds, tf.stack([lengths, tf.sqrt(lengths)], axis=1))
    total = tf.math.unsorted_segment_sum(tf.gather(table(), ids.values), ids.value_rowids(), ids.nrows())
    assert_rows(case, feeds, total / tf.maximum(lengths, 1)[:, None])


def test_counts_of_entries_with_weights(case, feeds):
    ids, y = ragged(case), tensor(case, "y")
    number = tf.shape(y)[0]
    each = tf.gather(y, ids.value_rowids())
    rows = tf.cast(ids.value_rowids(), tf.int32)
    sums = tf.raw_ops.DenseBincount(input=rows, size=number, weights=each)
    assert_rows(case, feeds, sums[:, None])
    other = tf.raw_ops.DenseBincount(input=rows, size=number + 1, weights=each)
    seen = tf.raw_ops.DenseBincount(input=rows, size=number, weights=each[:0], binary_output=True)
    for unknown in (other, seen):
        assert isinstance(case.kind(unknown), Unknown)
