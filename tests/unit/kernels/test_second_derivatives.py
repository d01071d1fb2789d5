"""Second derivatives: Hessians, their products with vectors, and per-example Jacobians equal one device's."""

from __future__ import annotations

import logging
from functools import cache

import keras
import numpy as np
import pytest
import tensorflow as tf

from autodist.capture.function import capture_function
from tests.unit.kernels.in_one_process import Session, assert_same, capture, one_device, plan, train
from tests.unit.kernels.pairs import pairs


def numbers(*shape):
    return np.random.default_rng(len(shape)).normal(size=shape)


def newton():
    weight = tf.Variable(numbers(3), name="weight")

    def step(x):
        with tf.GradientTape() as outer:
            with tf.GradientTape() as tape:
                each = tf.math.softplus(tf.linalg.matvec(x, weight))
                loss = tf.reduce_mean(each) + 0.01 * tf.reduce_sum(weight**2)
            gradient = tape.gradient(loss, weight)
        weight.assign_sub(tf.linalg.solve(outer.jacobian(gradient, weight), gradient[:, None])[:, 0])
        return loss

    return step


def newton_of_a_mean():
    weight = tf.Variable(numbers(3, 2), name="weight")

    def step(x):
        with tf.GradientTape() as outer, tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.tanh(x @ weight) ** 2 + 0.05 * tf.reduce_sum(weight**2))
            gradient = tape.gradient(loss, weight)
        hessian = tf.reshape(outer.jacobian(gradient, weight), [6, 6]) + tf.eye(6, dtype=x.dtype)
        weight.assign_sub(tf.reshape(tf.linalg.solve(hessian, tf.reshape(gradient, [6, 1])), [3, 2]))
        return loss

    return step


def jacobians_of_examples():
    weight = tf.Variable(numbers(3, 2), name="weight")

    def step(x):
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                made = tf.tanh(x @ weight)
            jacobians = inner.batch_jacobian(made, x)
            loss = tf.reduce_mean(made**2) + tf.reduce_mean(tf.reduce_sum(jacobians**2, [1, 2]))
        weight.assign_sub(0.1 * tape.gradient(loss, weight))
        return loss

    return step


def gradient_by_a_hessian_times_a_vector():
    weight, bias = tf.Variable(numbers(3, 2), name="weight"), tf.Variable(numbers(2), name="bias")

    def step(x):
        with tf.autodiff.ForwardAccumulator([weight, bias], [tf.ones_like(weight), 2 * tf.ones_like(bias)]) as forwards:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.tanh(x @ weight + bias) ** 2)
            gradients = tape.gradient(loss, [weight, bias])
        products = forwards.jvp(gradients)
        for variable, gradient, product in zip([weight, bias], gradients, products, strict=True):
            variable.assign_sub(0.1 * gradient / (1 + tf.abs(product)))
        return loss, *(tf.reduce_sum(product) for product in products)

    return step


def of_a_loss_with_a_penalty_of_keras():
    model = keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(2, "tanh", dtype="float64"), keras.layers.Dense(1, dtype="float64")]
    )
    weights = [w.value for w in model.trainable_variables]

    def step(x):
        with tf.autodiff.ForwardAccumulator(weights, [tf.ones_like(w) for w in weights]) as forwards:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(model(x) ** 2) + 0.01 * tf.add_n([tf.nn.l2_loss(w) for w in weights])
            gradients = tape.gradient(loss, weights)
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.assign_sub(0.1 * gradient)
        return loss, forwards.jvp(loss)

    return step


def along_a_direction():
    weight = tf.Variable(numbers(3, 2), name="weight")

    def step(x):
        with tf.autodiff.ForwardAccumulator(weight, tf.ones_like(weight)) as forwards:
            slope = forwards.jvp(tf.reduce_mean(tf.tanh(x @ weight) ** 2))
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.tanh(x @ weight) ** 2)
        weight.assign_sub(0.1 * tape.gradient(loss, weight) / (1 + slope**2))
        return loss

    return step


def natural_gradient():
    """Pulls a function of the gradient back through another parametrisation of the weight, after the loss."""
    weight = tf.Variable(numbers(3, 2), name="weight")

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.tanh(x @ weight) ** 2)
        gradient = tape.gradient(loss, weight)
        with tf.GradientTape(watch_accessed_variables=False) as other:
            value = weight.read_value()
            other.watch(value)
            parameters = tf.sinh(value) + value
        weight.assign_sub(0.1 * other.gradient(parameters, value, output_gradients=tf.tanh(gradient)))
        return loss

    return step


def of_a_solution_with_a_boundary():
    """Trained on how far it is from solving an equation, and on the first rows, which lie on the boundary."""
    weights = [tf.Variable(numbers(3, 4), name="first"), tf.Variable(numbers(4, 1), name="second")]

    def step(x):
        with tf.GradientTape() as tape:
            with tf.GradientTape() as twice:
                twice.watch(x)
                with tf.GradientTape() as once:
                    once.watch(x)
                    solution = tf.tanh(x @ weights[0]) @ weights[1]
                slope = once.gradient(solution, x)[:, :1]
            curvature = twice.gradient(slope, x)[:, :1]
            losses = [tf.reduce_mean((curvature - tf.sin(x[:, :1])) ** 2), tf.reduce_mean(solution[:2] ** 2)]
            loss = tf.reduce_sum(tf.stack(losses))
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(0.1 * gradient)
        return loss

    return step


STEPS = [
    newton, newton_of_a_mean, jacobians_of_examples, gradient_by_a_hessian_times_a_vector,
    of_a_loss_with_a_penalty_of_keras, along_a_direction, natural_gradient,
]  # fmt: skip
LAYOUTS = {
    "2 replicas": lambda step: plan(step, 1, 2),
    "2 workers, server": lambda step: plan(step, 2, 1, {g.variable: 1 for g in step.gradients}),
    "2 workers of 2": lambda step: plan(step, 2, 2),
}
BATCHES = [(np.random.default_rng(1).normal(size=(n, 3)),) for n in (6, 5, 2)]


WHOLE = [(np.random.default_rng(number).normal(size=(5, 3)),) for number in range(3)]


@cache
def captured_with(make):
    step = make()
    captured = capture(step, BATCHES[0][0])
    alone = tf.function(step, input_signature=[tf.TensorSpec([None, 3], tf.float64)])
    return captured, one_device(captured, alone, BATCHES)


@cache
def captured_whole(make):
    step = make()
    captured = capture_function(step, (tf.TensorSpec([5, 3], tf.float64),), batch_axes=[None])
    return captured, one_device(captured, tf.function(step), WHOLE)


@pytest.mark.parametrize("make, layout", pairs(STEPS, LAYOUTS))
def test_a_step_of_second_derivatives_is_that_of_one_device(make, layout, caplog):
    captured, alone = captured_with(make)
    assert_same(train(captured, LAYOUTS[layout](captured.step), BATCHES), alone, 1e-10)
    assert not [r for r in caplog.records if r.name.startswith("autodist") and r.levelname == "WARNING"]


@pytest.mark.parametrize(
    "make, layout",
    pairs(
        [newton_of_a_mean, gradient_by_a_hessian_times_a_vector, natural_gradient, of_a_solution_with_a_boundary],
        LAYOUTS,
    ),
)
def test_a_step_that_every_replica_makes_of_the_whole_batch_is_that_of_one_device(make, layout, caplog):
    captured, alone = captured_whole(make)
    assert_same(train(captured, LAYOUTS[layout](captured.step), WHOLE), alone, 1e-10)
    assert not [r for r in caplog.records if r.name.startswith("autodist") and r.levelname == "WARNING"]


def test_a_gradient_that_is_computed_once_from_reduced_gradients_is_not_logged(caplog):
    caplog.set_level(logging.INFO, "autodist")
    captured, _ = captured_with(natural_gradient)
    train(captured, LAYOUTS["2 replicas"](captured.step), BATCHES)
    assert "from its own examples" not in caplog.text


@pytest.mark.parametrize("make", [newton_of_a_mean, jacobians_of_examples])
def test_tensorflow_can_optimize_the_rewritten_step(make):
    captured, alone = captured_with(make)
    session = Session(captured, LAYOUTS["2 replicas"](captured.step), is_optimized=True)
    assert_same(session.train(BATCHES), alone, 1e-10)
