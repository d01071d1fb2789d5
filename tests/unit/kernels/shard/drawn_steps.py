"""Steps for drawn shardings, in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import keras
import numpy as np
import tensorflow as tf

from autodist.capture.function import CapturedFunction
from tests.unit.kernels.in_one_process import Batch, Trained, capture, one_device, plan, train

Step = Callable[..., object]
LENGTHS = (5, 4, 1)
"""The lengths of batches: with two parts one is uneven, and one is empty."""


@dataclass(frozen=True)
class DrawnModel:
    """A step with its batches.

    Attributes:
        captured: the step.
        step: the function.
        batches: for each step.
        by_replica: True if random numbers, statistics or outputs depend on the number of replicas.
    """

    captured: CapturedFunction
    step: Step
    batches: list[Batch]
    by_replica: bool = False

    def expected(self, replicas: int, workers: int | None = None) -> Trained:
        """Returns the results of one device, or of replicas without a mesh if the results depend on them.

        Args:
            replicas: number of replicas.
            workers: number of workers that have them: one draws for the whole batch. None: each has one replica.
        """
        if self.by_replica and replicas > 1:
            workers = workers or replicas
            return train(self.captured, plan(self.captured.step, workers, replicas // workers), self.batches)
        return one_device(self.captured, self.step, self.batches)


def variable(name: str, *shape: int, trainable: bool = True) -> tf.Variable:
    values = np.random.default_rng(len(name) + sum(shape)).normal(size=shape)
    return tf.Variable(0.4 * values, name=name, trainable=trainable)


def inputs(*shape: int) -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    return [rng.normal(size=(n, *shape)) for n in LENGTHS]


def ids(length: int, count: int) -> list[np.ndarray]:
    rng = np.random.default_rng(4)
    return [rng.integers(0, count, (n, length)).astype("int32") for n in LENGTHS]


def made(step: Step, *arguments: list[np.ndarray], by_replica: bool = False) -> DrawnModel:
    batches: list[Batch] = list(zip(*arguments, strict=True))
    return DrawnModel(capture(step, *batches[0]), step, batches, by_replica)


def trained(loss_of: Callable[..., tf.Tensor], weights: Sequence[tf.Variable]) -> Step:
    """A step of gradient descent."""

    def step(*batch: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(*batch)
        for weight, of_weight in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(0.05 * tf.convert_to_tensor(of_weight))
        return loss

    return step


def by_keras(layers: Callable[[], keras.Model], optimizer: Callable[[], keras.optimizers.Optimizer]) -> Step:
    """A step of a Keras model with the mean squared output as loss."""
    keras.utils.set_random_seed(1)
    model, updates = layers(), optimizer()
    updates.build(model.trainable_variables)

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            made = model(x, training=True)
            loss = tf.reduce_mean(tf.reduce_sum(tf.square(made - 0.5), axis=list(range(1, made.shape.rank))))
        updates.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    return step
