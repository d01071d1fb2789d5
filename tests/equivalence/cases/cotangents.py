"""Programs whose steps use cotangents, in forms found in scripts: clipped layers, adversarial examples."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.equivalence.cases.base import STEPS, Array, Results, Trainer, in_float32, own, program, register, values_of
from tests.unit.kernels import cotangent_steps

v1 = tf.compat.v1


def _batches(size: int = 30) -> Array:
    return np.random.default_rng(7).normal(size=(STEPS, size, 3))


def _step(make: Callable[[], Any], ad: Trainer) -> Results:
    """Trains a step; each worker feeds its own part of batches whose parts differ."""
    with ad.scope():
        made = make()
        step = ad.function(made)
        outputs = [tf.nest.flatten(step(own(ad, x))) for x in _batches()]
    variables = [cell.cell_contents for cell in made.__closure__ if isinstance(cell.cell_contents, tf.Variable)]
    return values_of(variables) | {"loss": np.array([[float(v) for v in values] for values in outputs])}


for _make in (
    cotangent_steps.clip_per_example,
    cotangent_steps.clip_under_a_mask,
    cotangent_steps.clip_gradient_of_weights,
    cotangent_steps.adversarial,
    cotangent_steps.two_groups,
    cotangent_steps.looked_at,
):
    register(f"step_cotangents_{_make.__name__}", functools.partial(_step, _make))


class _Clipped(keras.layers.Layer):
    """A layer that clips the norm of each example's gradient."""

    def call(self, x: Any) -> Any:
        return cotangent_steps.clipped(x)


@program
def fit_clipped_cotangents(ad: Trainer) -> Results:
    rng = np.random.default_rng(8)
    x, y = rng.normal(size=(75, 8)), rng.normal(size=(75, 2))
    with ad.scope():
        layers = [keras.layers.Dense(6, activation="tanh"), _Clipped(), keras.layers.Dense(2)]
        net = keras.Sequential([keras.Input((8,)), *layers])
        net.compile(keras.optimizers.Adam(0.01), "mse")
        history = net.fit(x, y, batch_size=20, epochs=2, shuffle=False, verbose=0)
    return values_of(net.variables) | {"loss": np.array(history.history["loss"])}


@program
def graph_fetched_cotangents(ad: Trainer) -> Results:
    """The chief alone fetches a gradient, of its own examples; all train as if nobody did."""
    with tf.Graph().as_default(), ad.scope():
        x = v1.placeholder(tf.float64, [None, 3])
        w = v1.get_variable("w", initializer=np.linspace(-0.5, 1.0, 6).reshape(3, 2))
        loss = tf.reduce_mean(tf.square(cotangent_steps.clipped(tf.tanh(x @ w)) - 1.0))
        (slope,) = tf.gradients(tf.reduce_mean(tf.tanh(x @ w)), x)
        train = v1.train.GradientDescentOptimizer(0.1).minimize(loss)
        with ad.create_distributed_session() as session:
            session.run(v1.global_variables_initializer())
            for batch in _batches():
                fetched = [train, slope] if ad.is_chief else [train]
                session.run(fetched, {x: own(ad, batch)})
            return {"w": session.run(w)}


def _fit_half(ad: Trainer) -> Results:
    """Mixed precision with a loss scale that grows at each step that it can, until that overflows."""
    rng = np.random.default_rng(9)
    x, y = rng.normal(size=(160, 8)).astype("float32"), rng.integers(0, 3, 160)
    policy = keras.DTypePolicy("mixed_float16")
    with ad.scope():
        layers = [keras.layers.Dense(32, "relu", dtype=policy), keras.layers.Dense(3, dtype=policy)]
        net = keras.Sequential([keras.Input((8,)), *layers])
        inner = keras.optimizers.SGD(0.05)
        optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0**15, dynamic_growth_steps=1)
        net.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        net.fit(x, y, batch_size=32, epochs=4, shuffle=False, verbose=0)
    scale = np.asarray(optimizer.dynamic_scale.numpy())
    return values_of(net.trainable_variables) | {"scale": scale}


register("fit_half_precision", functools.partial(in_float32, _fit_half))
