"""A model whose checkpoints the tests save, and the AutoDist that trains it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from autodist import AutoDist, ResourceSpec
from autodist.strategies import AllReduce

X = np.random.default_rng(0).normal(size=(12, 5))
IDS = np.random.default_rng(1).integers(0, 7, size=12)

SHARDS = {"min_partition_bytes": 1}
"""Options of a builder with which it partitions small variables, too."""


class Model(tf.Module):
    """A table and a matrix, trained with momentum, and a counter of steps."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        draw = np.random.default_rng(2)
        self.table = tf.Variable(draw.normal(size=(7, 5)), name="table")
        self.matrix = tf.Variable(draw.normal(size=(5, width)), name="matrix")
        self.momenta = [tf.Variable(tf.zeros_like(v), name=f"{v.name[:-2]}_momentum") for v in self.trained]
        self.steps = tf.Variable(0, dtype=tf.int64, name="steps", trainable=False)

    @property
    def trained(self) -> list[tf.Variable]:
        return [self.table, self.matrix]

    def step(self, x: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            rows = tf.gather(self.table, ids)
            loss = tf.reduce_mean(tf.square(tf.tanh((x + rows) @ self.matrix)))
        for variable, momentum, gradient in zip(
            self.trained, self.momenta, tape.gradient(loss, self.trained), strict=True
        ):
            momentum.assign(0.9 * momentum + tf.convert_to_tensor(gradient))
            variable.assign_sub(0.1 * momentum)
        self.steps.assign_add(1)
        return loss

    def values(self) -> dict[str, np.ndarray]:
        return {v.name: v.numpy() for v in (*self.trained, *self.momenta, self.steps)}


def autodist(builder: Any = None, replicas: int = 2) -> AutoDist:
    spec = ResourceSpec.from_dict({"nodes": [{"address": "localhost", "cpus": list(range(replicas))}]})
    return AutoDist(resource_spec=spec, strategy=builder or AllReduce())


def distributed(ad: AutoDist, width: int = 4) -> tuple[Model, Callable]:
    with ad.scope():
        model = Model(width)
        return model, ad.function(model.step)


def assert_close(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-9, atol=1e-12, err_msg=name)
