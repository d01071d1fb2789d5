"""Steps whose gradients are missing, or not applied, are rejected with the fix."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from autodist.capture.function import capture_function
from autodist.errors import CaptureError
from tests.unit.capture.captured_steps import OUTSIDE, captured, plain_step


def test_a_step_without_gradients_passes():
    found = captured(lambda x: tf.reduce_mean(x @ OUTSIDE))
    assert found.step.gradients == () and len(found.step.variables) == 1


def test_a_step_that_only_evaluates_passes():
    seen = tf.Variable(0.0, trainable=False)

    def step(x):
        seen.assign_add(tf.reduce_sum(x))
        return tf.reduce_mean(x @ OUTSIDE)

    assert captured(step).step.gradients == ()


def test_a_step_that_writes_a_trainable_variable_does_not_only_evaluate():
    def step(x):
        OUTSIDE.assign_add(tf.reduce_mean(x) * tf.ones([4, 2]))

    with pytest.raises(
        CaptureError, match="makes no gradient.*not write trainable variables.*means of the batch.*trainable=False"
    ):
        captured(step)


def test_a_step_may_write_a_trainable_variable_of_what_an_earlier_step_has_added_up():
    held = tf.Variable(tf.ones([4, 2]), trainable=False)

    def step(x):
        OUTSIDE.assign_sub(0.1 * held)

    assert captured(step).step.gradients == ()


def test_a_step_that_writes_a_trainable_variable_of_what_it_draws_is_refused():
    def step(x):
        OUTSIDE.assign_add(tf.random.normal([4, 2]))

    with pytest.raises(CaptureError, match="makes no gradient.*an earlier step has summed"):
        captured(step)


def test_a_jacobian_of_each_example_is_refused_with_what_gives_the_same():
    v = tf.Variable([[1.0], [2.0]], name="v")

    def clipped(x):
        with tf.GradientTape(persistent=True) as tape:
            losses = tf.square(x @ v)[:, 0]
        return tape, losses, lambda rows: tf.minimum(1.0, 1.0 / tf.norm(tf.reshape(rows, [-1, 2]), axis=1))

    def step(x):
        tape, losses, scales = clipped(x)
        rows = tape.jacobian(losses, v)
        v.assign_sub(tf.reduce_mean(rows * scales(rows)[:, None, None], 0))

    def other_step(x):
        with tf.GradientTape() as outer:
            tape, losses, scales = clipped(x)
            with outer.stop_recording():
                weights = scales(tape.jacobian(losses, v))
            loss = tf.reduce_mean(tf.stop_gradient(weights) * losses)
        v.assign_sub(outer.gradient(loss, v))

    x = tf.constant([[1.0, 2.0], [3.0, -1.0], [0.1, 0.2]])
    with pytest.raises(CaptureError, match=r"tape.gradient of tf.reduce_mean\(tf.stop_gradient\(scales\) \* losses\)"):
        capture_function(step, (x,), [0])
    assert capture_function(other_step, (x,), [0]).step.gradients
    found = []
    for one in (step, other_step):
        v.assign([[1.0], [2.0]])
        one(x)
        found.append(v.numpy())
    np.testing.assert_allclose(found[0], found[1], rtol=1e-6)


def test_gradients_that_are_not_applied_are_refused():
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(x @ OUTSIDE)
        return tape.gradient(loss, OUTSIDE)

    with pytest.raises(CaptureError, match="writes no variable from them"):
        captured(step)


@pytest.mark.feature("function", "step: a training step in a loop", refused="CaptureError")
def test_a_training_step_in_a_loop_is_refused():
    def step(x):
        for _ in tf.range(3):
            plain_step(x)
        return tf.constant(0.0)

    with pytest.raises(CaptureError, match="inside a tf.while_loop or tf.switch_case.*Move the loop.*may stay in it"):
        captured(step)
