"""Kinds of sums, means and functions of them: reductions, counts, quotients, products."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from autodist.graph.propagation import Elements, Examples, Mean, PerExample, Replicated, Scalar, Sum, Total, Unknown
from tests.unit.graph.propagation_batches import MEAN, SIZES, check, reason, tensor


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


@pytest.mark.parametrize("reduce", [tf.reduce_max, tf.reduce_min, tf.reduce_prod, tf.math.reduce_euclidean_norm])
def test_other_reductions_over_the_batch_are_unknown(case, reduce):
    assert "reduces over the batch" in reason(case, reduce(tensor(case, "x")))


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
