"""A step called within another step, or within a `tf.function`: inlined, or rejected."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from autodist.errors import CaptureError
from tests.unit.functions.descent import BATCHES, assert_trains, autodist, descend


@pytest.mark.feature("function", "step: a step within a step")
@pytest.mark.parametrize("inner_options", [{}, {"batch": "global"}, {"jit_compile": True}])
def test_a_step_within_a_step_is_part_of_it(inner_options):
    with autodist().scope() as ad:
        weight = tf.Variable(np.ones((2, 1)))

        @ad.function(**inner_options)
        def inner(x):
            loss = tf.zeros([], tf.float64)
            for k in range(1):
                loss += descend(weight, x) * tf.cast(k + 1, tf.float64)
            return loss

        @tf.function
        def between(x):
            return inner(x)

        @ad.function
        def outer(x):
            assert_tensor(x)
            return between(x)

    assert_trains(outer, weight)
    assert (outer.traces, inner.traces) == (1, 0)


def assert_tensor(x):
    assert isinstance(x, tf.Tensor) and not hasattr(x, "numpy")


def test_a_method_within_a_step_is_part_of_it():
    with autodist().scope() as ad:

        class Trainer:
            def __init__(self):
                self.weight = tf.Variable(np.ones((2, 1)))

            @ad.function
            def step(self, x):
                return descend(self.weight, x)

        trainer = Trainer()

        @ad.function
        def outer(x):
            return trainer.step(x)

    assert_trains(outer, trainer.weight)


@pytest.mark.feature("function", "step: a training step within a `tf.function`", refused="CaptureError")
def test_a_step_that_trains_is_refused_within_a_function():
    with autodist().scope() as ad:
        weight = tf.Variable(np.ones((2, 1)))

        @ad.function
        def step(x):
            return descend(weight, x)

        @tf.function
        def epoch(batches):
            for x in batches:
                step(x)

    message = "step trains .*tf.function, .*alone.*by @ad.function"
    with pytest.raises(CaptureError, match=message):
        tf.function(step)(tf.constant(BATCHES[0]))
    with pytest.raises(CaptureError, match=message):
        epoch(tf.data.Dataset.from_tensor_slices(BATCHES))
    np.testing.assert_array_equal(weight, np.ones((2, 1)))
    assert_trains(step, weight)


def test_a_function_that_evaluates_computes_the_whole_within_a_function():
    with autodist().scope() as ad:
        weight = tf.Variable(np.ones((2, 1)))

        @ad.function
        def evaluate(x):
            return tf.reduce_sum(x @ weight)

        @ad.function
        def train(x):
            return descend(weight, x)

    twice = tf.function(lambda x: 2.0 * evaluate(x))
    for x in BATCHES:
        train(x)
        np.testing.assert_allclose(twice(x), 2.0 * np.sum(x @ weight.numpy()), rtol=1e-12)
