"""Kinds of sums, means and functions of them: reductions, counts, quotients, products."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from autodist.layout import (
    Elements,
    Examples,
    Mean,
    PerExample,
    Reduced,
    ReducedBy,
    Replicated,
    Scalar,
    Sum,
    Total,
    Unknown,
)
from tests.unit.layout.batches import MEAN, SIZES, check, reason, tensor


def test_reductions(case, feeds):
    x, s = tensor(case, "x"), tensor(case, "s")
    check(
        case,
        feeds,
        [
            (tf.reduce_sum(x), Sum()),
            (tf.reduce_sum(x, 0), Sum()),
            (tf.reduce_sum(x, 1), PerExample(0)),
            (tf.reduce_mean(x), MEAN),
            (tf.reduce_mean(x, 0), MEAN),
            (tf.reduce_mean(s), MEAN),
            (tf.reduce_mean(s, [1, 2]), PerExample(0)),
            (tf.reduce_max(s, -1, keepdims=True), PerExample(0)),
            (tf.nn.l2_loss(x), Sum()),
            (tf.reduce_mean(tf.transpose(s, [1, 0, 2]), 0), PerExample(0)),
        ],
    )


REDUCTIONS = {
    tf.reduce_max: ReducedBy.MAX,
    tf.reduce_min: ReducedBy.MIN,
    tf.reduce_prod: ReducedBy.PRODUCT,
    tf.math.reduce_euclidean_norm: ReducedBy.NORM,
}


@pytest.mark.parametrize("reduce", REDUCTIONS, ids=lambda r: r.__name__)
def test_other_reductions_over_the_batch_join_by_themselves(case, feeds, reduce):
    x = tensor(case, "x")
    found = [reduce(x), reduce(x, 0), tf.identity(reduce(x)), tf.stop_gradient(reduce(x * 2.0, 0, keepdims=True))]
    for kind in case.assert_joins(found, feeds, SIZES):
        assert isinstance(kind, Reduced) and kind.by is REDUCTIONS[reduce]
    assert "reduces over the batch" in reason(case, reduce(x))


def test_truth_values_are_largest_and_smallest(case, feeds):
    x = tensor(case, "x")
    found = [
        tf.reduce_any(x > 1),
        tf.reduce_all(x > -1, 0),
        tf.cast(tf.reduce_any(x > 1), tf.float32),
        -tf.reduce_max(x),
    ]
    by = [kind.by for kind in case.assert_joins(found, feeds, SIZES)]
    assert by == [ReducedBy.MAX, ReducedBy.MIN, ReducedBy.MAX, ReducedBy.MIN]


def test_what_is_made_of_a_largest_value_is_unknown(case):
    x = tensor(case, "x")
    most = tf.reduce_max(x)
    made = [
        tf.square(most),
        most + 1.0,
        most - tf.reduce_min(x),
        tf.argmax(x[:, 0]),
        x / most,
        tf.ones_like(most) * most,
    ]
    made += [-tf.math.reduce_euclidean_norm(x), tf.cast(most > 0, tf.int32), tf.cast(most, tf.bool)]
    made += [tf.cast(most, tf.uint8), tf.where(most > 0, most, 0.0), tf.cond(x[0, 0] > 0, lambda: most, lambda: most)]
    for t in made:
        assert type(case.kind(t)) is Unknown, t


def test_largest_values_of_segments_join_where_segments_mean_the_same_everywhere(case, feeds):
    by_class = tf.math.unsorted_segment_max(tensor(case, "x"), tensor(case, "y"), 3)
    [kind] = case.assert_joins([by_class], feeds, SIZES)
    assert kind.by is ReducedBy.MAX


def test_counts_of_examples_and_of_elements(case, feeds):
    x, s = tensor(case, "x"), tensor(case, "s")
    check(
        case,
        feeds,
        [
            (tf.shape(x)[0], Sum()),
            (tf.size(s), Sum()),
            (tf.reduce_prod(tf.shape(s)), Sum()),
            (tf.shape(x)[1], Replicated()),
            (tf.shape(s)[1], Replicated()),
            (tf.reduce_sum(s) / tf.cast(tf.size(s), tf.float64), MEAN),
            (tf.reduce_sum(x) / tf.cast(tf.shape(x)[0], tf.float64), MEAN),
            (tf.reduce_sum(x) * (1 / tf.cast(tf.shape(x)[0], tf.float64)), MEAN),
            (tf.reduce_sum(x) / 7.0, Sum()),
        ],
    )
    assert "shape that holds the size of the batch" in case.kind(tf.shape(x)).reason


def test_quotients_of_sums_are_means_with_the_denominator_as_weight(case, feeds):
    x, s = tensor(case, "x"), tensor(case, "s")
    mask = tf.cast(tensor(case, "m"), tf.float64)
    valid = tf.reduce_sum(mask)
    share = tf.reduce_mean(mask)
    per_row = tf.reduce_sum(s, -1)
    weighted = Mean(Scalar(valid.name))
    check(
        case,
        feeds,
        [
            (tf.reduce_sum(per_row * mask) / valid, weighted),
            (tf.math.divide_no_nan(tf.reduce_sum(per_row * mask), valid), weighted),
            (tf.reduce_sum(per_row * mask) / tf.maximum(valid, 1), weighted),
            (tf.where(valid > 0, tf.reduce_sum(per_row * mask) / valid, 0), weighted),
            (tf.reduce_mean(per_row * mask) / share, Mean(Total(share.name, Examples()))),
            (tf.reduce_mean(per_row * tf.where(mask > 0, tf.cast(tf.size(mask), tf.float64) / valid, 0)), weighted),
        ],
    )
    assert "that is no sum" in reason(case, tf.maximum(tf.reduce_sum(x), 1))


def test_a_sum_over_more_than_its_divisor_counts_is_no_mean(case):
    x, s = tensor(case, "x"), tensor(case, "s")
    mask = tf.cast(tensor(case, "m"), tf.float64)
    valid, each = tf.reduce_sum(mask), tf.reduce_sum(s, -1)
    other = tf.cast(tensor(case, "m"), tf.float64) * tf.exp(each)
    for sums in (tf.reduce_sum(x), tf.reduce_sum(each + mask), tf.reduce_sum(x, 0), tf.reduce_sum(each * mask + each)):
        for quotient in (
            sums / valid,
            sums * (1 / valid),
            sums / tf.maximum(valid, 1),
            tf.reduce_sum(sums[None] / valid),
        ):
            assert type(case.kind(quotient)) is Unknown, quotient
    assert type(case.kind(tf.reduce_sum(each / tf.maximum(valid, 1)))) is Unknown
    assert type(case.kind(tf.reduce_sum(each * mask) / tf.reduce_sum(other))) is Unknown
    assert type(case.kind(tf.maximum(valid, 1))) is Unknown  # two replicas without any make 1, not 2
    assert case.kind(tf.reduce_sum(other) / tf.maximum(valid, 1)) == Mean(Scalar(valid.name))


def test_boolean_mask_weighs_by_the_rows_that_it_leaves(case, feeds):
    s, m = tensor(case, "s"), tensor(case, "m")
    kept = tf.boolean_mask(s, m)
    kinds = case.assert_joins([kept, tf.reduce_mean(kept)], feeds, SIZES)
    assert kinds[0] == PerExample(0)
    assert isinstance(kinds[1], Mean)
    assert isinstance(kinds[1].weight, Elements)


def test_sums_of_kinds(case, feeds):
    x = tensor(case, "x")
    penalty = tf.nn.l2_loss(tf.constant([1.0, 2.0], tf.float64))
    check(
        case,
        feeds,
        [
            (tf.reduce_mean(x) + penalty, MEAN),
            (tf.add_n([tf.reduce_mean(x), penalty, tf.reduce_mean(x * x)]), MEAN),
            (tf.reduce_sum(tf.stack([tf.reduce_mean(x), penalty])), MEAN),
            (tf.reduce_sum(x) + tf.reduce_sum(x * x), Sum()),
            (0.0 + tf.reduce_sum(x), Sum()),
            (2 * tf.reduce_sum(x) - 0.5 * tf.reduce_sum(x * x), Sum()),
        ],
    )
    assert "does not depend on the batch" in reason(case, tf.reduce_sum(x) + penalty)


def test_means_of_different_weights_do_not_add_up(case):
    x = tensor(case, "x")
    mask = tf.reduce_sum(tf.cast(tensor(case, "m"), tf.float64))
    masked = tf.reduce_sum(x) / mask
    assert "different weights" in reason(case, masked + tf.reduce_mean(x))
    assert "sums and means" in reason(case, tf.reduce_mean(x) + tf.reduce_sum(x))


@pytest.mark.parametrize("function", [tf.sqrt, tf.exp, tf.square, tf.math.log, tf.abs])
def test_other_functions_of_means_and_sums_are_unknown(case, function):
    x = tensor(case, "x")
    assert isinstance(case.kind(function(tf.reduce_mean(x))), Unknown)
    assert isinstance(case.kind(function(tf.reduce_sum(x))), Unknown)
    assert case.kind(function(x)) == PerExample(0)


def test_products(case, feeds):
    x, s = tensor(case, "x"), tensor(case, "s")
    kernel = tf.constant(np.random.default_rng(0).normal(size=(3, 2)))
    wide = tf.constant(np.random.default_rng(0).normal(size=(4, 2)))
    check(
        case,
        feeds,
        [
            (x @ kernel, PerExample(0)),
            (tf.matmul(kernel, x, transpose_a=True, transpose_b=True), PerExample(1)),
            (tf.matmul(x, x, transpose_a=True), Sum()),
            (tf.matmul(s, s, transpose_b=True), PerExample(0)),
            (tf.tensordot(s, wide, [[2], [0]]), PerExample(0)),
            (tf.einsum("btd,de->bte", s, wide), PerExample(0)),
            (tf.einsum("btd,bsd->ts", s, s), Sum()),
            (tf.einsum("b...,b...->...", x, x), Sum()),
            (tf.linalg.matvec(kernel, x, transpose_a=True), PerExample(0)),
        ],
    )
    assert "every other" in reason(case, tf.matmul(x, x, transpose_b=True))


def test_a_scalar_that_is_not_understood_never_scales_rows(case):
    x = tensor(case, "x")
    assert isinstance(case.kind(tf.reduce_mean(x / tf.sqrt(tf.reduce_sum(x)))), Unknown)
    assert isinstance(case.kind(tf.reduce_mean(x / tf.reduce_max(x))), Unknown)
