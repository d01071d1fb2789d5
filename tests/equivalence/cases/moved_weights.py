"""Steps that write weights several times, or write other variables after their update."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.equivalence.cases.base import Results, Trainer, classes, own, program, values_after_fit
from tests.equivalence.cases.models import make_loss

v1 = tf.compat.v1


class SharpnessAware(keras.Model):
    """Takes the second gradient at weights that are moved along the first, and moves them back."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        away = self._gradient(x, y)[0]
        size = tf.linalg.global_norm(away)
        for variable, gradient in zip(self.trainable_variables, away, strict=True):
            variable.assign_add(0.05 * gradient / size)
        gradients, loss, output = self._gradient(x, y)
        for variable, gradient in zip(self.trainable_variables, away, strict=True):
            variable.assign_sub(0.05 * gradient / size)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        for metric in self.metrics:
            metric.update_state(*([loss] if metric.name == "loss" else [y, output]))
        return {metric.name: metric.result() for metric in self.metrics}

    def _gradient(self, x: Any, y: Any) -> tuple[list[Any], Any, Any]:
        with tf.GradientTape() as tape:
            output = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=output)
        return tape.gradient(loss, self.trainable_variables), loss, output


@program
def fit_sharpness_aware(ad: Trainer) -> Results:
    """The `train_step` of Keras's example of sharpness-aware minimization, with Adam."""
    rng = np.random.default_rng(3)
    x, y = rng.normal(size=(60, 8)), classes(rng, 60)
    with ad.scope():
        keras.utils.set_random_seed(1)
        given = keras.Input((8,))
        net = SharpnessAware(given, keras.layers.Dense(3)(keras.layers.Dense(5, activation="tanh")(given)))
        net.compile(keras.optimizers.Adam(0.01), make_loss(), metrics=["accuracy"])
        history = net.fit(x, y, batch_size=20, epochs=2, shuffle=False, verbose=0)
    return values_after_fit(net, history)


@program
def graph_averages_behind_a_mean(ad: Trainer) -> Results:
    """A training step, an average of the batch, and averages of the weights, each behind the one before."""
    with tf.Graph().as_default(), ad.scope():
        x = v1.placeholder(tf.float64, [None, 3])
        weight = v1.get_variable("weight", initializer=np.ones(3))
        mean = v1.get_variable("mean", initializer=np.zeros(3), trainable=False)
        loss = tf.reduce_mean(tf.square(tf.linalg.matvec(x, weight) - 1))
        train = v1.train.GradientDescentOptimizer(0.1).minimize(loss)
        with tf.control_dependencies([train]):
            moved = mean.assign_add(0.1 * (tf.reduce_mean(x, 0) - mean))
        with tf.control_dependencies([moved]):
            follow = v1.train.ExponentialMovingAverage(0.9).apply([weight])
        with ad.create_distributed_session() as session:
            session.run(v1.global_variables_initializer())
            for k in range(5):
                session.run(follow, {x: own(ad, np.random.RandomState(k).rand(8, 3))})
            return dict(session.run({v.op.name: v for v in v1.global_variables()}))
