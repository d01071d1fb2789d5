"""The models of the matrix, in Keras, and their data: dense, convolution with batch norm, embedding."""

from __future__ import annotations

from dataclasses import dataclass

import keras
import numpy as np

from tests.equivalence.cases.base import BATCH, STEPS, Array, classes

VOCABULARY = 23
"""The ids of a batch are drawn from fewer, so that they repeat and some rows are never touched."""

MODELS = ("mlp", "convolution", "embedding")
OPTIMIZERS = ("momentum", "adam", "adagrad")


@dataclass(frozen=True)
class Batches:
    """Global batches.

    Attributes:
        x: STEPS × BATCH examples.
        y: their classes.
    """

    x: Array
    y: Array

    @property
    def examples(self) -> tuple[Array, Array]:
        """All examples in a row, for `fit`."""
        return self.x.reshape(-1, *self.x.shape[2:]), self.y.reshape(-1)

    def permuted(self, seed: int) -> Batches:
        """The same batches with the examples of each in another order."""
        rng = np.random.default_rng(seed)
        orders = [rng.permutation(BATCH) for _ in range(STEPS)]
        return Batches(*(np.stack([a[o] for a, o in zip(v, orders, strict=True)]) for v in (self.x, self.y)))


def make_batches(model: str) -> Batches:
    rng = np.random.default_rng(0)
    if model == "embedding":
        x = rng.integers(0, 17, (STEPS, BATCH, 5)).astype("int32")
    else:
        shape = (8,) if model == "mlp" else (6, 6, 2)
        x = rng.normal(size=(STEPS, BATCH, *shape)).astype(keras.config.floatx())
    return Batches(x, classes(rng, (STEPS, BATCH)))


def make_model(model: str) -> keras.Model:
    """A small model of three classes; the script's seed decides its first weights."""
    layers = keras.layers
    match model:
        case "mlp":
            return keras.Sequential([keras.Input((8,)), layers.Dense(16, activation="tanh"), layers.Dense(3)])
        case "convolution":
            return keras.Sequential(
                [
                    keras.Input((6, 6, 2)),
                    layers.Conv2D(4, 3, use_bias=False),
                    layers.BatchNormalization(momentum=0.9),
                    layers.Activation("tanh"),
                    layers.Flatten(),
                    layers.Dense(3),
                ]
            )
        case "embedding":
            ids = keras.Input((5,), dtype="int32")
            rows = layers.Embedding(VOCABULARY, 4)(ids)
            return keras.Model(ids, layers.Dense(3)(layers.GlobalAveragePooling1D()(rows)))
    raise AssertionError(model)


def make_optimizer(name: str, global_clipnorm: float | None = None) -> keras.Optimizer:
    match name:
        case "momentum":
            return keras.optimizers.SGD(0.05, momentum=0.9, global_clipnorm=global_clipnorm)
        case "adam":
            return keras.optimizers.Adam(0.01, global_clipnorm=global_clipnorm)
        case "adagrad":
            return keras.optimizers.Adagrad(0.05, global_clipnorm=global_clipnorm)
    raise AssertionError(name)


def make_loss() -> keras.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)
