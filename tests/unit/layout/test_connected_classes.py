"""Kinds of connectionist temporal classification (CTC) losses with padded labels, and of their inputs."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from autodist.layout import PerExample, Unknown
from tests.unit.layout.batches import MEAN, SIZES, tensor
from tests.unit.layout.graphs import Case, traced

CLASSES, LABELS, TIME = 5, 3, 9


@pytest.fixture
def case():
    """`logits` over time and `labels`, with the lengths of both."""
    built = Case()
    with built.graph.as_default():
        built.batch("logits", TIME, CLASSES, dtype=tf.float32)
        built.batch("labels", LABELS, dtype=tf.int32)
        built.batch("logit_length", dtype=tf.int32)
        built.batch("label_length", dtype=tf.int32)
        yield built


@pytest.fixture
def feeds():
    rng = np.random.default_rng(3)
    return {
        "logits": rng.normal(size=(7, TIME, CLASSES)).astype(np.float32),
        "labels": rng.integers(1, CLASSES, (7, LABELS)).astype(np.int32),
        "logit_length": rng.integers(2 * LABELS + 1, TIME + 1, 7).astype(np.int32),
        "label_length": rng.integers(1, LABELS + 1, 7).astype(np.int32),
    }


def of_tensorflow(labels, logits, label_length, logit_length):
    return tf.nn.ctc_loss(labels, logits, label_length, logit_length, logits_time_major=False, blank_index=0)


LOSSES = {"tensorflow": of_tensorflow, "keras.ops": keras.ops.ctc_loss}


@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_of_each_example_is_its_own(case, feeds, name):
    rows = LOSSES[name](*(tensor(case, n) for n in ("labels", "logits", "label_length", "logit_length")))
    assert case.assert_joins([rows, tf.reduce_mean(rows)], feeds, SIZES, rtol=1e-5) == [PerExample(0), MEAN]


def test_the_loss_of_keras_is_a_mean():
    specs = [tf.TensorSpec((None, LABELS), tf.int32), tf.TensorSpec((None, TIME, CLASSES), tf.float32)]
    found, outputs = traced(lambda labels, logits: [keras.losses.CTC()(labels, logits)], specs)
    assert [found.kind(output.name) for output in outputs] == [MEAN]


def numbers(case):
    return tf.expand_dims(tf.range(tf.shape(tensor(case, "labels"))[0]), 1)


def test_elements_put_into_each_example(case, feeds):
    """Coordinates [row index, 0, 0] plus replicated offsets are positions within each example."""
    values = tensor(case, "labels")[:, 1:]
    count = tf.shape(values)[0]
    places = tf.stack([tf.zeros_like([1, 2]), tf.constant([0, 1]), tf.constant([2, 0])], 1)

    def put(places, factors=(1, 0, 0), rows=count):
        each = tf.tile(tf.expand_dims(places, 0), [count, 1, 1])
        named = each + tf.expand_dims(numbers(case) * factors, 1)
        return tf.scatter_nd(named, values, [rows, 2, LABELS])

    assert case.assert_joins([put(places)], feeds, SIZES) == [PerExample(0)]
    for other in (put(places, rows=count + 1), put(places + 1), put(tf.reverse(places, [1])), put(places, (2, 0, 0))):
        assert isinstance(case.kind(other), Unknown)


def test_elements_put_beside_examples(case, feeds):
    over_time = tf.transpose(tensor(case, "logits"), [1, 0, 2])
    zeros = tf.zeros_like(over_time)
    put = tf.tensor_scatter_nd_add(zeros, [[2], [0]], over_time[:2] * 3)
    assert case.assert_joins([put], feeds, SIZES) == [PerExample(1)]
    first = tf.tensor_scatter_nd_update(tensor(case, "logits"), [[2]], tensor(case, "logits")[:1])
    assert isinstance(case.kind(first), Unknown)


def test_memory_that_is_set_holds_zeros(case, feeds):
    count = tf.shape(tensor(case, "labels"))[0]
    zeros = tf.raw_ops.Empty(shape=tf.stack([count, 2]), dtype=tf.float32, init=True)
    assert case.assert_joins([zeros], feeds, SIZES) == [PerExample(0)]
    unset = tf.raw_ops.Empty(shape=[2], dtype=tf.float32, init=False)
    assert isinstance(case.kind(unset), Unknown)
