"""Small models for drawn shardings, in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import keras
import numpy as np
import tensorflow as tf

from autodist.capture.function import CapturedFunction
from autodist.capture.sharding_marks import constrain
from autodist.sharding import Layout
from tests.unit.kernels.in_one_process import Batch, Trained, assert_same, capture, one_device, plan, train

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

    def expected(self, replicas: int) -> Trained:
        """Returns the results of one device, or of replicas without a mesh if the results depend on them."""
        if self.by_replica and replicas > 1:
            return train(self.captured, plan(self.captured.step, replicas), self.batches)
        return one_device(self.captured, self.step, self.batches)


def variable(name: str, *shape: int, trainable: bool = True) -> tf.Variable:
    values = np.random.default_rng(len(name) + sum(shape)).normal(size=shape)
    return tf.Variable(0.4 * values, name=name, trainable=trainable)


def _inputs(*shape: int) -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    return [rng.normal(size=(n, *shape)) for n in LENGTHS]


def _ids(length: int, count: int) -> list[np.ndarray]:
    rng = np.random.default_rng(4)
    return [rng.integers(0, count, (n, length)).astype("int32") for n in LENGTHS]


def _made(step: Step, *arguments: list[np.ndarray], by_replica: bool = False) -> DrawnModel:
    batches: list[Batch] = list(zip(*arguments, strict=True))
    return DrawnModel(capture(step, *batches[0]), step, batches, by_replica)


def _trained(loss_of: Callable[..., tf.Tensor], weights: Sequence[tf.Variable]) -> Step:
    """A step of gradient descent."""

    def step(*batch: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(*batch)
        for weight, of_weight in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(0.05 * tf.convert_to_tensor(of_weight))
        return loss

    return step


def _by_keras(layers: Callable[[], keras.Model], optimizer: Callable[[], keras.optimizers.Optimizer]) -> Step:
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


def _dense(optimizer: Callable[[], keras.optimizers.Optimizer]) -> DrawnModel:
    def layers() -> keras.Model:
        x = keras.Input((4,))
        y = keras.layers.Dense(8, activation="gelu", name="up")(x)
        y = keras.layers.LayerNormalization(name="norm")(y)
        return keras.Model(x, keras.layers.Dense(4, name="down")(y))

    return _made(_by_keras(layers, optimizer), _inputs(4))


def convolutions() -> DrawnModel:
    def layers() -> keras.Model:
        x = keras.Input((4, 4, 4))
        y = keras.layers.Conv2D(8, 3, padding="same", name="conv1")(x)
        y = keras.layers.BatchNormalization(name="norm")(y)
        y = keras.layers.MaxPooling2D(2, name="pool")(keras.layers.ReLU()(y))
        y = keras.layers.Conv2D(4, 2, name="conv2", padding="same")(y)
        return keras.Model(x, keras.layers.Dense(4, name="head")(keras.layers.Flatten()(y)))

    return _made(_by_keras(layers, lambda: keras.optimizers.SGD(1e-3)), _inputs(4, 4, 4), by_replica=True)


def whole_norms() -> DrawnModel:
    """Like `convolutions` without statistics of the batch."""

    def layers() -> keras.Model:
        x = keras.Input((4, 4, 4))
        y = keras.layers.Conv2D(8, 3, padding="same", strides=2, name="conv1")(x)
        y = keras.layers.GroupNormalization(2, name="norm")(y)
        y = keras.layers.DepthwiseConv2D(2, padding="same", name="depth")(keras.layers.ReLU()(y))
        y = keras.layers.Conv2DTranspose(4, 2, name="conv2", padding="same")(y)
        return keras.Model(x, keras.layers.GlobalAveragePooling2D()(y))

    return _made(_by_keras(layers, lambda: keras.optimizers.SGD(1e-3)), _inputs(4, 4, 4))


def recurrent(layer: Callable[..., keras.layers.Layer]) -> DrawnModel:
    def layers() -> keras.Model:
        x = keras.Input((3, 4))
        return keras.Model(x, keras.layers.Dense(4, name="head")(layer(4, name="loop")(x)))

    return _made(_by_keras(layers, lambda: keras.optimizers.SGD(0.05, momentum=0.9)), _inputs(3, 4))


def attention() -> DrawnModel:
    def layers() -> keras.Model:
        x = keras.Input((3, 8))
        y = keras.layers.MultiHeadAttention(2, 4, name="att", dropout=0.3, flash_attention=False, seed=1)(x, x)
        y = keras.layers.LayerNormalization(name="norm")(keras.layers.Add()([x, y]))
        return keras.Model(x, keras.layers.Dropout(0.4, seed=2)(y))

    return _made(_by_keras(layers, lambda: keras.optimizers.Adam(0.01, epsilon=1e-3)), _inputs(3, 8), by_replica=True)


def dropout() -> DrawnModel:
    def layers() -> keras.Model:
        x = keras.Input((4,))
        y = keras.layers.Dropout(0.4, seed=2)(keras.layers.Dense(8, name="up")(x))
        return keras.Model(x, keras.layers.Dense(4, name="down")(y))

    return _made(_by_keras(layers, lambda: keras.optimizers.SGD(0.05)), _inputs(4), by_replica=True)


def tied_embeddings() -> DrawnModel:
    table, w = variable("table", 8, 4), variable("w", 4, 4)

    def loss(ids: tf.Tensor) -> tf.Tensor:
        hidden = tf.nn.embedding_lookup(table, ids[:, :2]) @ w
        logits = tf.einsum("nte,ve->ntv", tf.tanh(hidden), table)
        of_each = tf.nn.sparse_softmax_cross_entropy_with_logits(ids[:, 1:], logits)
        return tf.reduce_mean(tf.reduce_sum(of_each, 1))

    return _made(_trained(loss, [table, w]), _ids(3, 8))


def gathers() -> DrawnModel:
    w, v, b = variable("w", 4, 8), variable("v", 8, 4), variable("b", 8)

    def loss(x: tf.Tensor) -> tf.Tensor:
        y = x @ w + b
        y = tf.concat([y[:, :4], tf.gather(y, [1, 3, 5, 7], axis=1)], 1)
        y = tf.stack([y, tf.reverse(y, [1]), y * 2.0], 1)
        z = tf.unstack(y @ v, axis=1)
        z = tf.concat([z[0], tf.pad(z[1], [[0, 0], [2, 2]]), z[2]], 1)
        left, right = tf.split(z, 2, 1)
        return tf.reduce_mean(tf.reduce_sum(left * tf.roll(right, 1, 1), 1))

    return _made(_trained(loss, [w, v, b]), _inputs(4))


def reductions() -> DrawnModel:
    w, v = variable("w", 4, 8), variable("v", 8, 4)

    def loss(x: tf.Tensor) -> tf.Tensor:
        y = tf.tanh(x @ w)
        found = [
            tf.reduce_max(y, 1), tf.reduce_min(y, 1), tf.reduce_prod(1.1 + y, 1), tf.reduce_mean(y, 1),
            tf.reduce_logsumexp(y, 1), tf.math.reduce_std(y, 1), tf.norm(y, axis=1),
            tf.cast(tf.argmax(y, 1), y.dtype) * tf.reduce_sum(y, 1), tf.cumsum(y, 1)[:, -1],
            tf.math.top_k(y, 2).values[:, 0], tf.sort(y, 1)[:, 3],
            tf.where(tf.reduce_any(y > 0.5, 1), y[:, 0], y[:, 5]), y[:, 1] * _rounded_mean(y),
            tf.cast(tf.gather(tf.transpose(y) > 0.0, [1, 6]), y.dtype)[0] * y[:, 2],
            tf.reduce_max(y @ v, 1), tf.reduce_min(y @ v, 1),
        ]  # fmt: skip
        return tf.reduce_mean(tf.add_n(found))

    return _made(_trained(loss, [w, v]), _inputs(4))


def _rounded_mean(y: tf.Tensor) -> tf.Tensor:
    return tf.cast(tf.reduce_mean(tf.cast(y * 10.0, tf.int32), 1), y.dtype)


def loss_scaling() -> DrawnModel:
    """Skips an update with an infinite gradient; scales the loss."""
    w, v = variable("w", 4, 8), variable("v", 8, 4)
    scale = tf.Variable(np.float64(8.0), name="scale", trainable=False)

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.reduce_sum(tf.exp(x @ w) @ v, 1))
            scaled = loss * scale
        found = [g / scale for g in tape.gradient(scaled, [w, v])]
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(g) & (tf.abs(g) < 2.0)) for g in found])

        def update() -> tf.Tensor:
            w.assign_sub(0.05 * found[0])
            v.assign_sub(0.05 * found[1])
            return scale.assign(scale * 1.5)

        tf.cond(finite, update, lambda: scale.assign(scale * 0.5))
        return loss

    return _made(step, _inputs(4))


def chosen_update() -> DrawnModel:
    """Like `loss_scaling`, by a selection in place of a branch; the branch computes with values alone."""
    w, v = variable("w", 4, 8), variable("v", 8, 4)

    def step(x: tf.Tensor) -> tuple[tf.Tensor, ...]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.reduce_sum(tf.tanh(x @ w) @ v, 1))
        found = tape.gradient(loss, [w, v])
        is_large = tf.reduce_max(tf.abs(found[0])) > 0.5
        factor = tf.cond(is_large, lambda: tf.norm(found[1]), lambda: tf.constant(0.1, tf.float64))
        first = tf.cond(is_large, lambda: found[0] * 0.5, lambda: found[0] + tf.reduce_mean(w))
        w.assign_sub(0.05 * factor * first)
        v.assign(tf.where(tf.math.is_finite(found[1]), v - 0.05 * found[1], v))
        return loss, tf.reduce_sum(w), factor

    return _made(step, _inputs(4))


def returned() -> DrawnModel:
    """Returns divided tensors, and reads variables before and after writes."""
    w, v, seen = variable("w", 4, 8), variable("v", 8, 4), variable("seen", 8, trainable=False)

    def step(x: tf.Tensor) -> tuple[tf.Tensor, ...]:
        with tf.GradientTape() as tape:
            hidden = tf.tanh(x @ w)
            made = hidden @ v
            loss = tf.reduce_mean(tf.reduce_sum(made**2, 1))
        of_w, of_v = tape.gradient(loss, [w, v])
        before = tf.identity(w)
        w.assign_sub(0.05 * of_w)
        seen.assign(0.5 * seen + tf.reduce_mean(hidden, 0))
        between = tf.reduce_sum(seen) + tf.reduce_sum(w, 1)
        w.assign_add(0.01 * tf.transpose(v))
        v.assign_sub(0.05 * of_v + 0.01 * tf.transpose(before))
        return loss, hidden, made, between, tf.identity(w), tf.identity(seen), of_v

    return _made(step, _inputs(4), by_replica=True)


def loop() -> DrawnModel:
    """Reads variables in a loop, in a function and in a map over rows."""
    w, v, u = variable("w", 4, 4), variable("v", 4, 8), variable("u", 8)

    @tf.function
    def inner(y: tf.Tensor) -> tf.Tensor:
        return tf.tanh(y @ v + u)

    def loss(x: tf.Tensor) -> tf.Tensor:
        y = tf.while_loop(lambda i, _: i < 3, lambda i, h: (i + 1, tf.tanh(h @ w) + 0.1), (0, x))[1]
        return tf.reduce_mean(tf.reduce_sum(inner(y) ** 2, 1))

    return _made(_trained(loss, [w, v, u]), _inputs(4))


def shapes() -> DrawnModel:
    """Reshapes, broadcasts and computes with lengths."""
    w, v, g = variable("w", 4, 8), variable("v", 2, 4, 4), variable("g", 1, 8)

    def loss(x: tf.Tensor) -> tf.Tensor:
        y = tf.ensure_shape((x @ w) * g, [None, 8])
        z = tf.reshape(y, [-1, 2, 4])
        z = tf.einsum("nhd,hde->nhe", z, v)
        z = tf.transpose(z, [1, 0, 2])
        z = z / tf.sqrt(tf.cast(tf.shape(z)[2], z.dtype)) + tf.ones(tf.shape(z), z.dtype)
        z = tf.reshape(tf.transpose(z, [1, 2, 0]), [tf.shape(x)[0], -1])
        z = tf.broadcast_to(z[:, None, :], [tf.shape(x)[0], 2, 8]) * tf.linspace(tf.constant(0.1, z.dtype), 1.0, 8)
        z = tf.tile(tf.expand_dims(z, 2), [1, 1, 3, 1]) * tf.one_hot(tf.range(3), 8, dtype=z.dtype)
        return tf.reduce_mean(tf.reduce_sum(tf.squeeze(z[:, :1], 1) ** 2, [1, 2]) / tf.cast(tf.size(w), z.dtype))

    return _made(_trained(loss, [w, v, g]), _inputs(4))


MODELS: dict[str, Callable[[], DrawnModel]] = {
    "sgd": lambda: _dense(lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True)),
    "adam": lambda: _dense(lambda: keras.optimizers.Adam(0.01, epsilon=1e-3, amsgrad=True)),
    "adamw": lambda: _dense(lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1, epsilon=1e-3, use_ema=True)),
    "ema": lambda: _dense(lambda: keras.optimizers.SGD(0.01, use_ema=True, ema_overwrite_frequency=2)),
    "adafactor": lambda: _dense(lambda: keras.optimizers.Adafactor(0.01, epsilon_1=1e-3)),
    "norm": lambda: _dense(lambda: keras.optimizers.SGD(0.05, clipnorm=0.1)),
    "global norm": lambda: _dense(lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.1, epsilon=1e-3)),
    "rmsprop": lambda: _dense(lambda: keras.optimizers.RMSprop(0.01, momentum=0.5, centered=True, clipvalue=0.1)),
    "convolutions": convolutions,
    "whole norms": whole_norms,
    "lstm": lambda: recurrent(keras.layers.LSTM),
    "gru": lambda: recurrent(keras.layers.GRU),
    "attention": attention,
    "dropout": dropout,
    "tied embeddings": tied_embeddings,
    "gathers": gathers,
    "reductions": reductions,
    "loss scaling": loss_scaling,
    "chosen update": chosen_update,
    "returned": returned,
    "loop": loop,
    "shapes": shapes,
}


@cache
def model_of(name: str) -> DrawnModel:
    return MODELS[name]()


@cache
def expected_of(name: str, replicas: int) -> Trained:
    return model_of(name).expected(replicas)


def assert_as_expected(found: Trained, expected: Trained, rtol: float = 1e-9) -> None:
    """Each place of a mesh has the variables and the outputs of its replica; one device has those of all."""
    places = len(found.outputs[0])
    for place in range(places):
        mine = [[outputs[place]] for outputs in found.outputs]
        wanted = [[outputs[place * len(outputs) // places]] for outputs in expected.outputs]
        assert_same(replace(found, outputs=mine), replace(expected, outputs=wanted), rtol)


CONSTRAINED = {"inputs": (4, 8), "heads": (4, 2, 4), "weights": (2, 4, 4), "attended": (4, 8), "hidden": (4, 16)}
"""The lengths of the tensors of `constrained`, without that of the batch."""


def constrained(layouts: Mapping[str, Layout], is_weighed: bool) -> DrawnModel:
    """A block of attention that constrains some of its tensors; `is_weighed` adds a reader of the hidden ones."""
    qkv, out, up, down = (
        variable("qkv", 8, 3, 2, 4),
        variable("out", 2, 4, 8),
        variable("up", 8, 16),
        variable("down", 16, 8),
    )

    def see(name: str, x: tf.Tensor) -> tf.Tensor:
        return constrain(x, layouts[name]) if name in layouts else x

    def loss(x: tf.Tensor) -> tf.Tensor:
        x = see("inputs", x)
        query, key, value = tf.unstack(tf.einsum("ntd,dkhe->knthe", _normalized(x), qkv))
        weights = see("weights", tf.nn.softmax(tf.einsum("nthe,nshe->nhts", see("heads", query), key)))
        made = tf.einsum("nhts,nshe->nthe", weights, value)
        x = see("attended", x + tf.einsum("nthe,hed->ntd", made, out))
        hidden = see("hidden", tf.nn.gelu(_normalized(x) @ up))
        found = tf.reduce_mean(tf.reduce_sum(tf.square(x + hidden @ down), [1, 2]))
        return found + tf.reduce_mean(tf.reduce_max(hidden, [1, 2])) if is_weighed else found

    return _made(_trained(loss, [qkv, out, up, down]), _inputs(4, 8))


def _normalized(x: tf.Tensor) -> tf.Tensor:
    mean, variance = tf.nn.moments(x, [-1], keepdims=True)
    return (x - mean) * tf.math.rsqrt(variance + 0.1)
