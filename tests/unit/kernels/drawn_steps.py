"""Random training steps: small models with dense, sparse, tied, frozen and scalar variables, in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import keras
import numpy as np
import tensorflow as tf
from hypothesis import strategies as st

from autodist.capture.function import CapturedFunction
from tests.unit.kernels.in_one_process import Batch, Trained, capture, one_device

OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.02),
    "momentum": lambda: keras.optimizers.SGD(0.02, momentum=0.9, nesterov=True),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "adamw": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.01, momentum=0.5, centered=True),
    "global norm": lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.1),
    "clipped": lambda: keras.optimizers.SGD(0.05, clipnorm=0.1),
    "average": lambda: keras.optimizers.SGD(0.02, use_ema=True, ema_momentum=0.9),
}

ROWS = 7


@dataclass(frozen=True)
class Choices:
    """The random choices that define a step."""

    loss: str
    optimizer: str
    is_tied: bool
    is_frozen: bool
    counts_steps: bool


CHOICES = st.builds(
    Choices,
    loss=st.sampled_from(["mean", "sum", "masked", "weighted"]),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    is_tied=st.booleans(),
    is_frozen=st.booleans(),
    counts_steps=st.booleans(),
)


def make_step(choices: Choices) -> Callable[..., object]:
    """A step of word ids (int32, n × 3), and targets (float64, n × 2)."""
    rng = np.random.default_rng(1)

    def variable(name: str, *shape: int, trainable: bool = True) -> keras.Variable:
        return keras.Variable(0.5 * rng.normal(size=shape), dtype="float64", name=name, trainable=trainable)

    table, kernel, gain = variable("table", ROWS, 4), variable("kernel", 4, 2), variable("gain")
    frozen = variable("frozen", 4, 4, trainable=False) if choices.is_frozen else None
    trained = [table, kernel, gain]
    optimizer = keras.optimizers.get(OPTIMIZERS[choices.optimizer]())
    optimizer.build(trained)
    seen = tf.Variable(0, dtype=tf.int64, name="seen", trainable=False) if choices.counts_steps else None

    def step(ids: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            hidden = tf.reduce_mean(tf.gather(table.value, ids), 1)
            if frozen is not None:
                hidden = hidden @ frozen.value
            if choices.is_tied:
                hidden = hidden + tf.tanh(hidden @ tf.transpose(table.value)) @ table.value
            error = tf.square(gain.value * tf.tanh(hidden) @ kernel.value - targets)
            loss = LOSSES[choices.loss](error, ids)
        gradients = tape.gradient(loss, [v.value for v in trained])
        optimizer.apply_gradients(zip(gradients, trained, strict=True))
        if seen is not None:
            seen.assign_add(1)
        return loss

    return step


def _masked(error: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
    """The mean over the examples whose first id is not 0."""
    mask = tf.cast(ids[:, 0] > 0, tf.float64)
    return tf.math.divide_no_nan(tf.reduce_sum(tf.reduce_mean(error, 1) * mask), tf.reduce_sum(mask))


LOSSES = {
    "mean": lambda error, ids: tf.reduce_mean(error),
    "sum": lambda error, ids: tf.reduce_sum(error) / 100.0,
    "masked": _masked,
    "weighted": lambda error, ids: tf.reduce_mean(tf.reduce_sum(error, 1) * tf.cast(ids[:, 1], tf.float64)) / 10.0,
}


def make_batches(seed: int, sizes: Sequence[int]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Batches with ids that repeat."""
    rng = np.random.default_rng(seed)
    return [(rng.integers(0, ROWS, (n, 3)).astype(np.int32), rng.normal(size=(n, 2))) for n in sizes]


@lru_cache(maxsize=1)  # for all strategies
def on_one_device(choices: Choices, seed: int, sizes: tuple[int, ...]) -> tuple[CapturedFunction, list[Batch], Trained]:
    """Returns a captured step, batches, and one device's results on them."""
    step, batches = make_step(choices), make_batches(seed, sizes)
    captured = capture(step, *batches[0])
    return captured, batches, one_device(captured, step, batches)
