"""Keras variables whose "gradient" is their new value: they get one device's values."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from autodist.errors import RewriteError
from tests.unit.kernels.in_one_process import assert_same, capture, one_device, plan, rewritten, train

pytestmark = pytest.mark.usefixtures("keras_in_float64")


class Watched(keras.layers.Layer):
    """Forwards its input, and stores a statistic of it through a gradient."""

    def __init__(self, look):
        super().__init__()
        self._look = look

    def build(self, _):
        self.seen = self.add_weight(shape=(), initializer="zeros", name="seen", overwrite_with_gradient=True)

    def call(self, inputs):
        @tf.custom_gradient
        def watched(x, seen):
            return x, lambda upstream: (upstream, 0.5 * seen + self._look(x))

        return watched(inputs, self.seen.value)


def step_of(look):
    layer, dense = Watched(look), keras.layers.Dense(2, kernel_initializer=keras.initializers.GlorotUniform(1))
    layer.build((None, 4))
    dense.build((None, 4))
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    variables = [*layer.trainable_variables, *dense.trainable_variables]
    optimizer.build(variables)

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(dense(layer(x))))
        optimizer.apply(tape.gradient(loss, [v.value for v in variables]), variables)
        return loss

    return step


def batches():
    rng = np.random.default_rng(0)
    return [(rng.normal(size=(n, 4)),) for n in (6, 5, 1)]


@pytest.mark.parametrize("shape", [(1, 2), (2, 1)], ids=str)
@pytest.mark.parametrize("look", [lambda x: tf.reduce_mean(tf.abs(x)), lambda x: tf.constant(0.5, x.dtype)])
def test_they_are_not_summed(look, shape):
    step = step_of(look)
    captured = capture(step, batches()[0][0])
    assert "seen" not in " ".join(g.variable for g in captured.step.gradients)
    assert_same(train(captured, plan(captured.step, *shape), batches()), one_device(captured, step, batches()))


def test_values_unknown_for_the_whole_batch_are_refused():
    captured = capture(step_of(lambda x: tf.sort(tf.reshape(x, [-1]))[2]), batches()[0][0])
    with pytest.raises(RewriteError, match="seen is overwritten with a value that each replica computes"):
        rewritten(captured, plan(captured.step, 1, 2))


@pytest.mark.feature("function", "precision: float8 quantization")
def test_the_state_of_float8_layers_is_that_of_the_whole_batch():
    net = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    net.layers[0].quantize("float8")
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(net.trainable_variables)

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(net(x, training=True)))
        optimizer.apply(tape.gradient(loss, [v.value for v in net.trainable_variables]), net.trainable_variables)
        return loss

    captured = capture(step, batches()[0][0])
    item = captured.step
    assert {g.variable.rsplit("/")[-1] for g in item.gradients} == {"kernel", "bias"}
    assert len([v for v in item.variables if v.is_overwritten]) == 6
    alone, many = (train(captured, plan(item, 1, k), batches()) for k in (1, 2))
    for variable in item.variables:
        np.testing.assert_allclose(many.variable(variable.name), alone.variable(variable.name), rtol=1e-5, atol=1e-6)
