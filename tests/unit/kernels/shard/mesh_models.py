"""Models for tests of meshes, with the layouts of their variables."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import keras
import numpy as np
import tensorflow as tf

from autodist.capture.function import CapturedFunction
from tests.unit.kernels.in_one_process import Batch, capture

TOKENS, LENGTH = 12, 6
MEGATRON = {
    r"b\d_att/(query|key|value)/kernel": "[–, model, –]",
    r"b\d_att/attention_output/kernel": "[model, –, –]",
    r"b\d_up/kernel": "[–, model]",
    r"b\d_down/kernel": "[model, –]",
}
"""Attention is divided by heads, the other layers by columns and rows."""


@dataclass(frozen=True)
class Model:
    """A step, and batches for it."""

    step: Callable[..., tf.Tensor]
    captured: CapturedFunction
    batches: list[Batch]

    def layouts(self, patterns: Mapping[str, str]) -> dict[str, str]:
        """The layouts of the variables that the patterns match."""
        names = [variable.name for variable in self.captured.step.variables]
        return {name: text for name in names for pattern, text in patterns.items() if re.fullmatch(pattern, name)}


def perceptron(lengths: tuple[int, ...] = (8, 7, 1, 5)) -> Model:
    """Two layers with momentum for the first one."""
    rng = np.random.default_rng(0)
    w1, w2 = (tf.Variable(rng.normal(size=size), name=name) for name, size in (("w1", (6, 8)), ("w2", (8, 4))))
    b1, m1 = (tf.Variable(np.zeros(size), name=name) for name, size in (("b1", 8), ("m1", (6, 8))))

    def step(x, y):
        with tf.GradientTape() as tape:
            made = tf.nn.relu(x @ w1 + b1) @ w2
            loss = tf.reduce_mean(tf.reduce_sum((made - y) ** 2, 1))
        of_w1, of_b1, of_w2 = tape.gradient(loss, [w1, b1, w2])
        m1.assign(0.9 * m1 + of_w1)
        w1.assign_sub(0.01 * m1)
        b1.assign_sub(0.01 * of_b1)
        w2.assign_sub(0.01 * of_w2)
        return loss

    batches = [(rng.normal(size=(n, 6)), rng.normal(size=(n, 4))) for n in lengths]
    return Model(step, capture(step, *batches[0]), batches)


def transformer(optimizer: keras.optimizers.Optimizer, blocks: int = 1, lengths: tuple[int, ...] = (4, 3)) -> Model:
    """A language model of attention blocks."""
    keras.utils.set_random_seed(1)
    model = _language_model(blocks)
    optimizer.build(model.trainable_variables)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def step(ids, labels):
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(ids, training=True))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    rng = np.random.default_rng(0)
    batches = [tuple(rng.integers(0, TOKENS, (2, n, LENGTH)).astype("int32")) for n in lengths]
    return Model(step, capture(step, *batches[0]), batches)


def _language_model(blocks: int) -> keras.Model:
    ids = keras.Input((LENGTH,), dtype="int32")
    x = keras.layers.Embedding(TOKENS, 16, name="embed")(ids)
    for b in range(blocks):
        y = keras.layers.LayerNormalization(name=f"b{b}_ln1")(x)
        y = keras.layers.MultiHeadAttention(4, 4, name=f"b{b}_att", flash_attention=False)(y, y)
        x = keras.layers.Add(name=f"b{b}_add1")([x, y])
        y = keras.layers.LayerNormalization(name=f"b{b}_ln2")(x)
        y = keras.layers.Dense(32, activation="gelu", name=f"b{b}_up")(y)
        y = keras.layers.Dense(16, name=f"b{b}_down")(y)
        x = keras.layers.Add(name=f"b{b}_add2")([x, y])
    return keras.Model(ids, keras.layers.Dense(TOKENS, name="head")(x))


def table(update: str) -> Model:
    """A table with lookups, whose gradient is rows."""
    rng = np.random.default_rng(0)
    rows = tf.Variable(rng.normal(size=(8, 4)), name="rows")
    w = tf.Variable(rng.normal(size=(4, 2)), name="w")

    def step(ids, y):
        with tf.GradientTape() as tape:
            made = tf.reduce_sum(tf.nn.embedding_lookup(rows, ids), 1) @ w
            if update == "tied":
                first = tf.nn.embedding_lookup(rows, ids[:, 0])
                made += tf.reduce_sum(tf.matmul(first, rows, transpose_b=True), 1, keepdims=True)
            loss = tf.reduce_mean(tf.reduce_sum((made - y) ** 2, 1))
        of_rows, of_w = tape.gradient(loss, [rows, w])
        w.assign_sub(0.1 * of_w)
        if update == "rows":
            rows.scatter_sub(tf.IndexedSlices(0.1 * of_rows.values, of_rows.indices))
        else:
            rows.assign_sub(0.1 * tf.convert_to_tensor(of_rows))
        return loss

    batches = [(rng.integers(0, 8, (n, 3)), rng.normal(size=(n, 2))) for n in (6, 5, 1)]
    return Model(step, capture(step, *batches[0]), batches)
