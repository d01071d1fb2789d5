"""Values reduced over all workers have a known shape."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from autodist.capture.function import CapturedFunction, capture_function
from autodist.errors import RewriteError
from tests.unit.kernels.in_one_process import assert_same, one_device, plan, rewritten, train

X, WHOLE = np.random.default_rng(0).normal(size=(6, 3)), np.arange(1.0, 6.0)


def step_that_returns_a_norm(is_sized: bool):
    """A step that returns the norm of a mean over the batch, with an element for each unsplit input."""
    weight = tf.Variable(np.ones((3, 1)), name="weight")

    def step(x, whole):
        with tf.GradientTape() as tape:
            y = x @ weight
            loss = tf.reduce_mean(tf.square(y))
        weight.assign_sub(0.1 * tape.gradient(loss, weight))
        mean = tf.reduce_mean(y * whole[None], 0)
        return tf.norm(tf.ensure_shape(mean, WHOLE.shape) if is_sized else mean)

    return step


def captured(step) -> CapturedFunction:
    specs = tf.TensorSpec([None, 3], tf.float64), tf.TensorSpec([None], tf.float64)
    return capture_function(step, specs, [0, None])


@pytest.mark.parametrize("servers", [0, 1])
def test_a_mean_of_unknown_length_in_what_is_returned_is_refused_by_name_on_two_workers(servers: int) -> None:
    traced = captured(step_that_returns_a_norm(is_sized=False))
    with pytest.raises(
        RewriteError, match=r"'Mean_1:0' has the shape \(None,\), .* tf.ensure_shape, or specify the length"
    ):
        rewritten(traced, plan(traced.step, 2, 1, servers=servers))
    rewritten(traced, plan(traced.step, 1, 2))  # replicas of one worker send nothing


@pytest.mark.parametrize("servers", [0, 1])
def test_with_the_shape_that_the_refusal_asks_for_it_is_that_of_one_device(servers: int) -> None:
    step = step_that_returns_a_norm(is_sized=True)
    traced = captured(step)
    alone = one_device(traced, step, [(X, WHOLE)])
    assert_same(train(traced, plan(traced.step, 2, 1, servers=servers), [(X, WHOLE)]), alone)
