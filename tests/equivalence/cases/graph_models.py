"""The models of the matrix in the style of TensorFlow 1: a graph, placeholders, and variables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from tests.equivalence.cases.base import Array
from tests.equivalence.cases.models import VOCABULARY

v1 = tf.compat.v1


@dataclass(frozen=True)
class GraphModel:
    """A model in the default graph.

    Attributes:
        x: placeholder of the examples.
        y: placeholder of their classes.
        logits: by example.
        loss: mean over the examples.
        changes: operations that change variables in the forward pass.
    """

    x: tf.Tensor
    y: tf.Tensor
    logits: tf.Tensor
    loss: tf.Tensor
    changes: Sequence[tf.Operation] = ()


def build(model: str) -> GraphModel:
    """Returns a model whose initial weights are the same in every graph."""
    weights = Weights()
    y = v1.placeholder(tf.int32, [None], "y")
    changes: list[tf.Operation] = []
    match model:
        case "mlp":
            x = v1.placeholder(tf.float64, [None, 8], "x")
            hidden = tf.tanh(x @ weights.draw("hidden/kernel", 8, 16) + weights.draw("hidden/bias", 16))
        case "convolution":
            x = v1.placeholder(tf.float64, [None, 6, 6, 2], "x")
            maps = tf.nn.conv2d(x, weights.draw("convolution/kernel", 3, 3, 2, 4), strides=1, padding="VALID")
            normal, changes = batch_norm(weights, maps)
            hidden = tf.reshape(tf.tanh(normal), [-1, 4 * 4 * 4])
        case "embedding":
            x = v1.placeholder(tf.int32, [None, 5], "x")
            table = weights.draw("embedding/table", VOCABULARY, 4)
            hidden = tf.reduce_mean(tf.nn.embedding_lookup(table, x), axis=1)
        case _:
            raise AssertionError(model)
    logits = hidden @ weights.draw("logits/kernel", hidden.shape[1], 3) + weights.draw("logits/bias", 3)
    loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits))
    return GraphModel(x, y, logits, loss, changes)


class Weights:
    """Makes variables whose initial values do not depend on the graph."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(3)

    def draw(self, name: str, *shape: int) -> tf.Variable:
        return self.fill(name, self._rng.normal(0, 0.3, shape))

    @staticmethod
    def fill(name: str, value: Array, trainable: bool = True) -> tf.Variable:
        return v1.get_variable(name, initializer=value, trainable=trainable)


def batch_norm(weights: Weights, maps: tf.Tensor) -> tuple[tf.Tensor, list[tf.Operation]]:
    """Normalises each channel by the batch; also returns the operations that change the moving averages."""
    channels = maps.shape[-1]
    scale, offset = weights.fill("norm/scale", np.ones(channels)), weights.fill("norm/offset", np.zeros(channels))
    mean, variance = tf.nn.moments(maps, axes=[0, 1, 2])
    averages = [
        weights.fill("norm/moving_mean", np.zeros(channels), trainable=False),
        weights.fill("norm/moving_variance", np.ones(channels), trainable=False),
    ]
    changes = [
        v1.assign_sub(average, 0.1 * (average - value)).op
        for average, value in zip(averages, (mean, variance), strict=True)
    ]
    return tf.nn.batch_normalization(maps, mean, variance, offset, scale, 1e-3), changes


def make_graph_optimizer(name: str) -> v1.train.Optimizer:
    match name:
        case "momentum":
            return v1.train.MomentumOptimizer(0.05, 0.9)
        case "adam":
            return v1.train.AdamOptimizer(0.01)
        case "adagrad":
            return v1.train.AdagradOptimizer(0.05)
    raise AssertionError(name)
