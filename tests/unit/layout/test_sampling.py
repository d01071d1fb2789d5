"""Kinds with candidate sampling: `nce_loss` and `sampled_softmax_loss`, and the ops they consist of."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from autodist.layout import Mean, PerExample, Replicated, Unknown
from tests.unit.layout.batches import MEAN, SIZES, reason, tensor
from tests.unit.layout.graphs import Case

CLASSES, WIDTH, TRUE, SAMPLED = 12, 3, 2, 5
LOSSES = {"nce": tf.nn.nce_loss, "softmax": tf.nn.sampled_softmax_loss}
random = tf.random


@pytest.fixture
def case():
    """Vectors `x` and classes `label`, two per example."""
    built = Case()
    with built.graph.as_default():
        built.batch("x", WIDTH)
        built.batch("label", TRUE, dtype=tf.int64)
        yield built


@pytest.fixture
def feeds():
    rng = np.random.default_rng(4)
    return {"x": rng.normal(size=(7, WIDTH)), "label": rng.integers(0, CLASSES, (7, TRUE))}


def weights():
    rng = np.random.default_rng(0)
    return tf.constant(rng.normal(size=(CLASSES, WIDTH))), tf.constant(rng.normal(size=CLASSES))


def given(label):
    expected = tf.cast(tf.fill(tf.shape(label), 0.3), tf.float64)
    return tf.constant([1, 3, 4, 7, 9], tf.int64), expected, tf.constant([0.3] * SAMPLED, tf.float64)


def in_float64(sampled):
    return sampled[0], tf.cast(sampled[1], tf.float64), tf.cast(sampled[2], tf.float64)


def every(label):
    return in_float64(random.all_candidate_sampler(label, TRUE, CLASSES, False))


def loss_of(case, name, sampled, hits=True, num_sampled=SAMPLED):
    matrix, bias = weights()
    label = tensor(case, "label")
    return LOSSES[name](
        matrix, bias, label, tensor(case, "x"), num_sampled, CLASSES, TRUE, sampled(label), remove_accidental_hits=hits
    )


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("hits", [True, False])
def test_a_loss_with_given_samples(case, feeds, name, hits):
    rows = loss_of(case, name, given, hits)
    assert case.assert_joins([rows, tf.reduce_mean(rows)], feeds, SIZES) == [PerExample(0), MEAN]


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_with_every_class(case, feeds, name):
    rows = loss_of(case, name, every, num_sampled=CLASSES)
    assert case.assert_joins([rows, tf.reduce_mean(rows)], feeds, SIZES) == [PerExample(0), MEAN]


SAMPLERS = {
    "uniform": random.uniform_candidate_sampler,
    "log uniform": random.log_uniform_candidate_sampler,
    "fixed": lambda *a: random.fixed_unigram_candidate_sampler(*a, unigrams=[1.0] * CLASSES),
    "learned": random.learned_unigram_candidate_sampler,
}


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_with_samples_that_each_replica_draws(case, name, sampler):
    rows = loss_of(case, name, lambda label: in_float64(SAMPLERS[sampler](label, TRUE, SAMPLED, True, CLASSES)))
    kind = case.kind(tf.reduce_mean(rows))
    assert (case.kind(rows), kind) == (PerExample(0), MEAN)
    assert (kind.mixed_at is not None) == (sampler == "learned")


def test_what_samplers_give(case):
    label = tensor(case, "label")
    drawn, true, expected = random.uniform_candidate_sampler(label, TRUE, SAMPLED, True, CLASSES)
    assert isinstance(case.kind(drawn), Unknown)
    assert isinstance(case.kind(expected), Unknown)
    assert case.kind(true) == PerExample(0)
    classes, _, ones = random.all_candidate_sampler(label, TRUE, CLASSES, True)
    assert (case.kind(classes), case.kind(ones)) == (Replicated(), Replicated())
    _, of_constants, _ = random.uniform_candidate_sampler([[1, 2]], TRUE, SAMPLED, True, CLASSES)
    assert isinstance(case.kind(of_constants), Unknown)  # the number of draws needed differs between replicas


def test_rows_and_what_stands_behind_them(case, feeds):
    """A slice must split them exactly at the boundary."""
    x, table = tensor(case, "x"), tf.constant(np.arange(8.0 * WIDTH).reshape(8, WIDTH))
    both = tf.concat([x, table], 0)
    count = tf.shape(x)[0]
    first = tf.slice(both, [0, 0], tf.stack([count, -1]))
    behind = tf.slice(both, tf.stack([count, 0]), [-1, -1])
    assert case.assert_joins([first, behind], feeds, SIZES) == [PerExample(0), Replicated()]
    shifted = tf.slice(both, tf.stack([count - 1, 0]), [-1, -1])
    twice = tf.slice(tf.concat([x, x, table], 0), [0, 0], tf.stack([count, -1]))
    fewer = tf.slice(tf.concat([tf.reshape(x, [-1, 1]), table[:, :1]], 0), [0, 0], tf.stack([count, -1]))
    narrow = tf.slice(both, [0, 1], tf.stack([count, -1]))
    whole = tf.reduce_sum(both)
    for value in (shifted, twice, fewer, narrow, both, whole):
        assert isinstance(case.kind(value), Unknown), value
    for value in (both, whole):
        assert "belongs to no example" in reason(case, value)


def test_a_product_with_noise_keeps_rows(case):
    x = tensor(case, "x")
    noise = random.normal([WIDTH, 4], dtype=tf.float64)
    assert case.kind(tf.reduce_mean(x @ noise)) == Mean(MEAN.weight)
    assert isinstance(case.kind(tf.matmul(x, random.normal([7, 4], dtype=tf.float64), transpose_a=True)), Unknown)
    assert isinstance(case.kind(tf.reduce_sum(x) * tf.reduce_sum(noise @ tf.transpose(noise))), Unknown)
