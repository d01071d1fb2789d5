"""Variables that several steps share, that Python assigns between steps, or that are computed from others."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tests.equivalence.cases.base import STEPS, Array, Results, Trainer, own, program

Step = Any


def _inputs(size: int = 12, width: int = 4) -> Array:
    return np.random.default_rng(9).normal(size=(STEPS, size, width))


def _pair() -> tuple[tf.Variable, tf.Variable]:
    rows = np.random.default_rng(10).normal(size=(2, 4, 3))
    return tf.Variable(rows[0], name="first"), tf.Variable(rows[1], name="second")


def _values(losses: Any, **variables: tf.Variable) -> Results:
    return {name: variable.numpy() for name, variable in variables.items()} | {"loss": np.array(losses)}


@program
def step_two_functions(ad: Trainer) -> Results:
    """The first step reads variables that only the second one trains, which is thus planned after the first has run.

    Between them Python reads and assigns the trained variables.
    """
    with ad.scope():
        first, second = _pair()

        @ad.function
        def train_first(x: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.tanh(x @ first) * (x @ second))
            first.assign_sub(0.1 * tape.gradient(loss, first))
            return loss

        @ad.function
        def train_second(x: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.tanh(x @ first) * tf.square(x @ second))
            second.assign_sub(0.1 * tape.gradient(loss, second))
            return loss

        losses = []
        for position, x in enumerate(_inputs()):
            losses.append([float(train(own(ad, x))) for train in (train_first, train_second)])
            if position % 3 == 0:
                first.assign(0.5 * first.numpy() + 0.1)
            if position % 3 == 1:
                second.assign_add(first)
    return _values(losses, first=first, second=second)


@program
def step_target_network(ad: Trainer) -> Results:
    """Every replica reads weights that follow the trained ones and have no gradient.

    Both terms of a sum have the same gradient by two of the trained variables.
    """
    with ad.scope():
        trained, added = _pair()
        target = tf.Variable(0.5 * trained, trainable=False, name="target")

        @ad.function
        def step(x: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                both = tf.tanh(x @ (trained + added))
                loss = tf.reduce_mean(tf.square(both - tf.stop_gradient(tf.cos(x @ target))))
            by_trained, by_added = tape.gradient(loss, (trained, added))
            trained.assign_sub(0.1 * by_trained)
            added.assign_sub(0.3 * by_added)
            target.assign(0.8 * target + 0.2 * trained)
            return loss

        losses = [float(step(own(ad, x))) for x in _inputs()]
    return _values(losses, trained=trained, added=added, target=target)
