"""The trace keys of a step: signature, lengths and requested options."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tests.unit.functions.descent import BATCHES, assert_trains, autodist, descend


def padded_sum(ad, weight, **options):
    @ad.function(**options)
    def step(x, scale):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.reduce_sum(x * weight, axis=1)) * scale
        weight.assign_sub(0.1 * tape.gradient(loss, weight))
        return loss

    return step


@pytest.mark.feature("function", "step: `input_signature`, `reduce_retracing`")
@pytest.mark.parametrize(
    ("options", "traces"),
    [
        ({"input_signature": (tf.TensorSpec([None, None], tf.float64), tf.TensorSpec([], tf.float64))}, 1),
        ({"input_signature": (tf.TensorSpec(None, tf.float64), tf.TensorSpec([], tf.float64))}, 1),
        ({"reduce_retracing": True}, 2),
        ({}, 3),
    ],
)
def test_lengths_that_differ_are_traced_as_is_asked(options, traces):
    lengths = (3, 5, 3, 4)
    with autodist().scope() as ad:
        weight = tf.Variable(1.0, dtype=tf.float64)
        step = padded_sum(ad, weight, **options)
    value = 1.0
    for seed, length in enumerate(lengths):
        x = np.random.default_rng(seed).normal(size=(5, length))
        slope = x.sum(axis=1).mean() * 2.0
        np.testing.assert_allclose(float(step(x, 2.0)), slope * value, rtol=1e-12)
        value -= 0.1 * slope
    np.testing.assert_allclose(float(weight), value, rtol=1e-12)
    assert step.traces == traces


def test_numbers_and_lists_become_what_the_signature_says():
    seen = []
    with autodist(1).scope() as ad:
        weight = tf.Variable(1.0)

        @ad.function(input_signature=[{"x": tf.TensorSpec([None], tf.float32)}, tf.TensorSpec([], tf.float32)])
        def step(batch, rate=0.5):
            seen.append(rate.dtype)
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(batch["x"] * weight)
            weight.assign_sub(rate * tape.gradient(loss, weight))
            return loss

    assert float(step({"x": np.array([1.0, 3.0], np.float32)})) == 2.0
    assert float(step({"x": tf.constant([2.0])}, rate=1)) == 0.0
    assert seen == [tf.float32]
    with pytest.raises(TypeError, match="float64"):
        step({"x": tf.constant([2.0], tf.float64)})
    with pytest.raises(TypeError, match="shape"):
        step({"x": np.ones((2, 2), np.float32)})


def test_a_nested_function_gets_tensors_by_its_signature():
    with autodist().scope() as ad:
        weight = tf.Variable(np.ones((2, 1)))

        @tf.function(input_signature=[tf.TensorSpec([], tf.float64)])
        def half(number):
            return tf.cast(number, number.dtype) / 2.0

        @ad.function
        def step(x):
            return half(2.0) * descend(weight, x)

    assert_trains(step, weight)


def test_python_values_that_have_no_hash_are_known_by_themselves():
    with autodist(1).scope() as ad:
        weight = tf.Variable(1.0)

        @ad.function
        def step(x, options):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(x * weight)
            weight.assign_sub(0.0 * tape.gradient(loss, weight))
            return loss * max(options.values)

    class Options:
        __hash__ = None

        def __init__(self, *values):
            self.values = values

    x = np.ones(2, np.float32)
    assert [float(step(x, Options(k))) for k in (1, 2, 3)] == [1, 2, 3]
    assert step.traces == 3


@pytest.mark.parametrize("autograph", [True, False])
def test_autograph_is_as_asked(autograph):
    with autodist().scope() as ad:
        weight = tf.Variable(np.ones((2, 1)))

        @ad.function(autograph=autograph)
        def step(x):
            if tf.reduce_mean(weight) < 100.0:
                return descend(weight, x) * 1.0
            return tf.constant(0.0, tf.float64)

    if autograph:
        assert step(BATCHES[0]) > 0.0
        assert weight.numpy().max() != 1.0
    else:
        with pytest.raises(TypeError, match="symbolic"):
            step(BATCHES[0])
