"""State: writes outside of the update are combined as declared, or rejected."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from autodist.errors import RewriteError
from tests.unit.kernels.in_one_process import assert_same, capture, one_device, plan, rewritten, train
from tests.unit.kernels.pairs import pairs
from tests.unit.kernels.replicate.steps import SHAPES, batches, check, every_shape, hardest_shape, variable

pytestmark = pytest.mark.usefixtures("keras_in_float64")


def normalised_step(norm, kernel):
    def forward(x):
        image = tf.nn.conv2d(tf.reshape(x, (-1, 4, 4, 1)), kernel.value, 1, "SAME")
        return tf.reduce_mean(tf.square(norm(image, training=True)) * tf.reduce_mean(x))

    return forward


@every_shape
def test_batch_norm_sees_its_replicas_part(shape):
    """Against one device that computes the same parts one after another and averages (equal parts)."""
    kernel = keras.Variable(np.random.default_rng(0).normal(size=(3, 3, 1, 2)), name="kernel")
    norm = layers.BatchNormalization()
    norm.build((None, 4, 4, 2))
    trained = [kernel, norm.gamma, norm.beta]
    forward = normalised_step(norm, kernel)
    replicas = shape[0] * shape[1]

    def step(x):
        with tf.GradientTape() as tape:
            loss = forward(x)
        for weight, gradient in zip(trained, tape.gradient(loss, [v.value for v in trained]), strict=True):
            weight.value.assign_sub(0.1 * gradient)
        return loss

    def by_parts(x):
        moving = [norm.moving_mean, norm.moving_variance]
        found, averages, losses = [], [], []
        before = [v.value.numpy() for v in moving]
        for part in tf.split(x, replicas):
            for v, value in zip(moving, before, strict=True):
                v.assign(value)
            with tf.GradientTape() as tape:
                losses.append(forward(part))
            found.append(tape.gradient(losses[-1], [v.value for v in trained]))
            averages.append([v.value.numpy() for v in moving])
        for weight, *gradients in zip(trained, *found, strict=True):
            weight.value.assign_sub(0.1 * tf.add_n(gradients) / replicas)
        for v, *values in zip(moving, *averages, strict=True):
            v.assign(np.mean(values, 0))
        return tf.add_n(losses) / replicas

    data = batches(replicas * 2, replicas * 3, width=16)
    captured = capture(step, *data[0])
    assert_same(train(captured, plan(captured.step, *shape), data), one_device(captured, by_parts, data))


@pytest.mark.parametrize("corrected, is_known", [(lambda hidden: hidden, True), (tf.sqrt, False)])
def test_a_moving_variance_with_its_bias_corrected_is_averaged(corrected, is_known, caplog):
    """Each of two replicas normalises its part; only a value that is not proportional to the average is logged."""
    names = {"hidden": np.ones(2), "average": np.ones(2), "steps": np.zeros(())}
    hidden, average, steps = (tf.Variable(value, name=name, trainable=False) for name, value in names.items())
    kernel = variable("kernel", 1, 1, 1, 2)
    ones, none = tf.ones(2), tf.constant([])

    def step(x):
        with tf.GradientTape() as tape:
            image = tf.cast(tf.nn.conv2d(tf.reshape(x, (-1, 4, 4, 1)), kernel, 1, "SAME"), tf.float32)
            made, _, variance, *_ = tf.raw_ops.FusedBatchNormV3(
                x=image, scale=ones, offset=ones, mean=none, variance=none, is_training=True
            )
            loss = tf.reduce_mean(made**2)
        steps.assign_add(1.0)
        hidden.assign_sub((hidden - tf.cast(variance, tf.float64)) * 0.1)
        average.assign(corrected(hidden / (1.0 - tf.pow(tf.constant(0.9, tf.float64), steps))))
        kernel.assign_sub(0.1 * tape.gradient(loss, kernel))
        return loss

    data = batches(4, width=16)
    captured = capture(step, *data[0])
    found = train(captured, plan(captured.step, 1, 2), data)
    logged = [message for message in caplog.messages if "becomes the mean of the replicas' values" in message]
    assert bool(logged) is not is_known
    if is_known:
        np.testing.assert_allclose(found.variable("average"), found.variable("hidden") / (1 - 0.9), rtol=1e-12)


def test_state_of_replicas_without_examples_is_left_out():
    norm = layers.BatchNormalization()
    norm.build((None, 4))
    weight = variable("w", 4, 4)

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(norm(x @ weight, training=True)))
        weight.assign_sub(0.1 * tape.gradient(loss, weight))
        return loss

    check(step, batches(1), (1, 3))
    check(step, batches(1), (3, 1))


@pytest.mark.parametrize("how, shape", pairs(["SUM", "MEAN", "ONLY_FIRST_REPLICA"], SHAPES))
def test_state_is_combined_as_declared(how, shape):
    """Each replica adds the sum of its part of 1, 2, …; of two, three or four equal parts of it."""
    replicas = shape[0] * shape[1]
    state = tf.Variable(0.0, dtype=tf.float64, name="state", trainable=False, aggregation=tf.VariableAggregation[how])
    weight = variable("w", 1)

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(x * weight)
        weight.assign_sub(0.1 * tape.gradient(loss, weight))
        state.assign_add(tf.reduce_sum(x))
        return loss

    x = np.arange(1.0, 13.0)[:, None]
    captured = capture(step, x)
    found = train(captured, plan(captured.step, *shape), [(x,)]).variable("state")
    parts = [part.sum() for part in np.split(x, replicas)]
    expected = {"SUM": np.sum(parts), "MEAN": np.mean(parts), "ONLY_FIRST_REPLICA": parts[0]}[how]
    np.testing.assert_allclose(found, expected, rtol=1e-12)


@hardest_shape
def test_a_sum_of_unknown_dependence_on_the_batch_is_added_by_each_replica(shape):
    weight = variable("w", 1)
    summed = tf.VariableAggregation.SUM
    state = tf.Variable(0.0, dtype=tf.float64, name="state", trainable=False, aggregation=summed)

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(x * weight)
        weight.assign_sub(0.1 * tape.gradient(loss, weight))
        state.assign_add(tf.sqrt(tf.reduce_sum(tf.matmul(x, x, transpose_b=True))))
        return loss

    x = np.arange(1.0, 13.0)[:, None]
    captured = capture(step, x)
    found = train(captured, plan(captured.step, *shape), [(x,)]).variable("state")
    np.testing.assert_allclose(found, sum(part.sum() for part in np.split(x, shape[0] * shape[1])), rtol=1e-12)


@hardest_shape
def test_counters_count_once(shape):
    count, weight = variable("count", dtype=np.int64, trainable=False), variable("w", 4, 1)

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(x @ weight)
        weight.assign_sub(0.1 * tape.gradient(loss, weight))
        count.assign_add(1)
        return count.read_value()

    found = check(step, batches(5, 1, 2), shape)
    assert found.variable("count") == 3


def step_that_scatters(scatter):
    state, weight = variable("state", 4), variable("w", 4, 1)

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(x @ weight)
        weight.assign_sub(0.1 * tape.gradient(loss, weight))
        getattr(state, scatter)(tf.IndexedSlices(tf.reduce_sum(x)[None], tf.constant([0])))
        return loss

    return step


@pytest.mark.parametrize("shape", [(1, 2), (2, 1)])
def test_a_sum_scattered_outside_the_update_is_that_of_one_device(shape):
    check(step_that_scatters("scatter_add"), batches(4, 2), shape)


@pytest.mark.parametrize("shape", [(1, 2), (2, 1)])
def test_a_product_scattered_outside_the_update_is_refused(shape):
    captured = capture(step_that_scatters("scatter_mul"), *batches(4)[0])
    with pytest.raises(RewriteError, match="state by ResourceScatterMul"):
        rewritten(captured, plan(captured.step, *shape))


def test_state_that_one_of_several_branches_writes_is_refused_with_its_mend():
    weight, average = variable("w", 4, 2), variable("average", 4, trainable=False)
    mode = tf.Variable(1, trainable=False, name="mode")

    def step(x):
        keep, assign = average.value, lambda: average.assign(tf.reduce_mean(x, 0)).value()
        tf.switch_case(mode.value(), [keep, assign, keep])
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(x @ weight))
        weight.assign_sub(0.1 * tape.gradient(loss, weight))
        return loss

    captured = capture(step, *batches(4)[0])
    with pytest.raises(RewriteError, match="average by Case.*Return the new value from tf.switch_case"):
        rewritten(captured, plan(captured.step, 1, 2))
