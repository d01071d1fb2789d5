"""Programs that request XLA compilation, each with a twin that does not and trains the same."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import keras
import numpy as np
import tensorflow as tf

from tests.equivalence.cases.base import STEPS, Results, Trainer, classes, own, register, values_after_fit, values_of
from tests.equivalence.cases.models import make_loss, make_model

layers = keras.layers


def fit(ad: Trainer, jit_compile: bool) -> Results:
    """Images, and a last batch that does not divide."""
    rng = np.random.default_rng(3)
    x, y = rng.normal(size=(90, 6, 6, 2)), classes(rng, 90)
    with ad.scope():
        net = keras.Sequential(
            [
                keras.Input((6, 6, 2)),
                layers.Conv2D(4, 3, activation="gelu"),
                layers.MaxPooling2D(),
                layers.Flatten(),
                layers.LayerNormalization(),
                layers.Dense(3),
            ]
        )
        optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.05, global_clipnorm=0.5)
        net.compile(optimizer, make_loss(), metrics=["accuracy"], jit_compile=jit_compile)
        history = net.fit(x, y, batch_size=20, epochs=2, shuffle=False, verbose=0)
    return values_after_fit(net, history)


def fit_recurrent(ad: Trainer, jit_compile: bool) -> Results:
    """A loop, and rows of a table."""
    rng = np.random.default_rng(4)
    x, y = rng.integers(0, 9, (60, 5)).astype("int32"), classes(rng, 60)
    with ad.scope():
        net = keras.Sequential(
            [keras.Input((5,), dtype="int32"), layers.Embedding(9, 4), layers.LSTM(5), layers.Dense(3)]
        )
        net.compile(keras.optimizers.Adagrad(0.1), make_loss(), jit_compile=jit_compile)
        history = net.fit(x, y, batch_size=20, epochs=2, shuffle=False, verbose=0)
    return values_after_fit(net, history)


def step(ad: Trainer, jit_compile: bool) -> Results:
    """A step of one's own, compiled as a whole."""
    return _step(ad, of_step=jit_compile, of_loss=False)


def nested(ad: Trainer, jit_compile: bool) -> Results:
    """A custom step whose forward pass and loss are compiled."""
    return _step(ad, of_step=False, of_loss=jit_compile)


def _step(ad: Trainer, of_step: bool, of_loss: bool) -> Results:
    rng = np.random.default_rng(5)
    xs, ys = rng.normal(size=(STEPS, 30, 8)), classes(rng, (STEPS, 30))
    with ad.scope():
        net, optimizer, mean = make_model("mlp"), keras.optimizers.Adam(0.01), make_loss()

        @functools.partial(tf.function, jit_compile=of_loss)
        def loss_of(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
            return mean(y, net(x, training=True))

        def train(x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor]:
            with tf.GradientTape() as tape:
                loss = loss_of(x, y)
            gradients = tape.gradient(loss, net.trainable_variables)
            optimizer.apply_gradients(zip(gradients, net.trainable_variables, strict=True))
            return (loss,)

        train_step = ad.function(train, jit_compile=of_step)
        losses = [[float(v) for v in train_step(own(ad, x), own(ad, y))] for x, y in zip(xs, ys, strict=True)]
    return values_of([*net.variables, *optimizer.variables]) | {"loss": np.array(losses)}


TWINS: Mapping[str, str] = {
    f"jit_{make.__name__}": f"plain_{make.__name__}" for make in (fit, fit_recurrent, step, nested)
}
"""For each program that requests XLA, its twin that does not."""

for _make in (fit, fit_recurrent, step, nested):
    register(f"jit_{_make.__name__}", functools.partial(_make, jit_compile=True))
    register(f"plain_{_make.__name__}", functools.partial(_make, jit_compile=False))
