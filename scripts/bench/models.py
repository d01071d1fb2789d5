"""The models that are timed, their optimizers and synthetic data, all float32.

Data and weights come from NumPy generators with fixed seeds, so that every way of training starts from the same
numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

CHARACTERS, SEQUENCE = 96, 64
BLOCKS, MODEL_WIDTH, HEADS = 12, 256, 4
ROWS, IDS, WIDTH = 200_000, 20, 64
EMBEDDING_SCALE = 0.05

Data = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Task:
    """A model and its training data.

    Attributes:
        batch: examples in a global batch.
        batches: number of different batches; training cycles through them.
        build: makes the model.
        optimizer: makes the optimizer.
        data: makes inputs and labels of a number of examples from a generator.
        is_binary: True if the loss is that of one logit, False if it is the cross-entropy of classes.
    """

    batch: int
    batches: int
    build: Callable[[], keras.Model]
    optimizer: Callable[[], Any]
    data: Callable[[np.random.Generator, int], Data]
    is_binary: bool = False

    def make_model(self) -> keras.Model:
        """Returns the model, with matrices from a fixed seed; vectors keep Keras's constant initial values."""
        model = self.build()
        rng = np.random.default_rng(1)
        for variable in model.trainable_variables:
            shape = tuple(variable.shape)
            if len(shape) > 1:
                variable.assign(rng.standard_normal(shape, dtype=np.float32) * np.float32(_scale(shape)))
        return model

    def make_data(self) -> Data:
        return self.data(np.random.default_rng(0), self.batch * self.batches)

    def loss(self, y: Any, logits: Any, examples: int) -> Any:
        """Returns the sum of the examples' losses, each the mean over its tokens, divided by a fixed number of
        examples.
        """
        compare = keras.ops.binary_crossentropy if self.is_binary else keras.ops.sparse_categorical_crossentropy
        each = compare(y, logits, from_logits=True)
        if len(each.shape) > 1:
            each = keras.ops.mean(each, -1)
        return keras.ops.sum(each) / examples


def _scale(shape: tuple[int, ...]) -> float:
    if shape == (ROWS, WIDTH):
        return EMBEDDING_SCALE
    is_depthwise = len(shape) == 4 and shape[3] == 1
    return float(np.sqrt(2 / np.prod(shape[:2] if is_depthwise else shape[:-1])))


def _vectors(width: int) -> Callable[[np.random.Generator, int], Data]:
    return lambda rng, n: (rng.standard_normal((n, width), dtype=np.float32), _classes(rng, n))


def _images(rng: np.random.Generator, n: int) -> Data:
    return rng.standard_normal((n, 64, 64, 3), dtype=np.float32), _classes(rng, n)


def _id_lists(rng: np.random.Generator, n: int) -> Data:
    ids = rng.integers(0, ROWS, (n, IDS)).astype(np.int32)
    return ids, rng.integers(0, 2, (n, 1)).astype(np.float32)


def _texts(rng: np.random.Generator, n: int) -> Data:
    text = rng.integers(0, CHARACTERS, (n, SEQUENCE + 1)).astype(np.int32)
    return text[:, :-1].copy(), text[:, 1:].copy()


def _classes(rng: np.random.Generator, n: int) -> np.ndarray:
    return rng.integers(0, 10, n).astype(np.int32)


def _tiny() -> keras.Model:
    return keras.Sequential([keras.Input((32,)), keras.layers.Dense(10)])


def _two_layers() -> keras.Model:
    return keras.Sequential([keras.Input((32,)), keras.layers.Dense(32, activation="relu"), keras.layers.Dense(10)])


def _mlp() -> keras.Model:
    hidden = [keras.layers.Dense(1024, activation="relu") for _ in range(4)]
    return keras.Sequential([keras.Input((784,)), *hidden, keras.layers.Dense(10)])


def _mobilenet() -> keras.Model:
    return keras.applications.MobileNetV2(input_shape=(64, 64, 3), weights=None, classes=10, classifier_activation=None)


def _embedding() -> keras.Model:
    layers = [keras.layers.Embedding(ROWS, WIDTH), keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(1)]
    return keras.Sequential([keras.Input((IDS,), dtype="int32"), *layers])


def _lstm() -> keras.Model:
    layers = [
        keras.layers.Embedding(CHARACTERS, 64),
        keras.layers.LSTM(256, return_sequences=True),
        keras.layers.Dense(CHARACTERS),
    ]
    return keras.Sequential([keras.Input((SEQUENCE,), dtype="int32"), *layers])


class Block(keras.layers.Layer):
    """A block of a transformer, which attends to earlier characters."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.attention = keras.layers.MultiHeadAttention(HEADS, MODEL_WIDTH // HEADS)
        self.before_attention, self.before_up = (keras.layers.LayerNormalization() for _ in range(2))
        self.up = keras.layers.Dense(4 * MODEL_WIDTH, activation="relu")
        self.down = keras.layers.Dense(MODEL_WIDTH)

    def build(self, shape: tuple[int | None, ...]) -> None:
        self.attention.build(shape, shape)
        for layer in (self.before_attention, self.before_up, self.up):
            layer.build(shape)
        self.down.build((*shape[:-1], 4 * MODEL_WIDTH))

    def call(self, x: Any) -> Any:
        attended = self.before_attention(x)
        x = x + self.attention(attended, attended, use_causal_mask=True)
        return x + self.down(self.up(self.before_up(x)))


def _transformer() -> keras.Model:
    blocks = [Block(name=f"block_{k}") for k in range(BLOCKS)]
    layers = [keras.layers.Embedding(CHARACTERS, MODEL_WIDTH), *blocks, keras.layers.Dense(CHARACTERS)]
    return keras.Sequential([keras.Input((SEQUENCE,), dtype="int32"), *layers])


TASKS: dict[str, Task] = {
    "tiny": Task(32, 8, _tiny, lambda: keras.optimizers.SGD(0.1), _vectors(32)),
    "two-layers": Task(32, 8, _two_layers, lambda: keras.optimizers.SGD(0.1), _vectors(32)),
    "mlp": Task(128, 8, _mlp, lambda: keras.optimizers.Adam(1e-3), _vectors(784)),
    "mlp-sgd": Task(128, 8, _mlp, lambda: keras.optimizers.SGD(0.1), _vectors(784)),
    "mobilenet": Task(32, 4, _mobilenet, lambda: keras.optimizers.SGD(0.01, momentum=0.9), _images),
    "embedding": Task(256, 8, _embedding, lambda: keras.optimizers.SGD(0.1), _id_lists, is_binary=True),
    "embedding-adagrad": Task(256, 8, _embedding, lambda: keras.optimizers.Adagrad(0.1), _id_lists, is_binary=True),
    "transformer": Task(32, 8, _transformer, lambda: keras.optimizers.Adam(1e-3), _texts),
    "lstm": Task(64, 8, _lstm, lambda: keras.optimizers.Adam(1e-3), _texts),
}
