"""Steps of single ops and of control flow for drawn shardings."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tests.unit.kernels.shard.drawn_steps import DrawnModel, ids, inputs, made, trained, variable


def tied_embeddings() -> DrawnModel:
    table, w = variable("table", 8, 4), variable("w", 4, 4)

    def loss(ids: tf.Tensor) -> tf.Tensor:
        hidden = tf.nn.embedding_lookup(table, ids[:, :2]) @ w
        logits = tf.einsum("nte,ve->ntv", tf.tanh(hidden), table)
        of_each = tf.nn.sparse_softmax_cross_entropy_with_logits(ids[:, 1:], logits)
        return tf.reduce_mean(tf.reduce_sum(of_each, 1))

    return made(trained(loss, [table, w]), ids(3, 8))


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

    return made(trained(loss, [w, v, b]), inputs(4))


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

    return made(trained(loss, [w, v]), inputs(4))


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

    return made(step, inputs(4))


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

    return made(step, inputs(4))


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

    return made(step, inputs(4), by_replica=True)


def loop() -> DrawnModel:
    """Reads variables in a loop, in a function and in a map over rows."""
    w, v, u = variable("w", 4, 4), variable("v", 4, 8), variable("u", 8)

    @tf.function
    def inner(y: tf.Tensor) -> tf.Tensor:
        return tf.tanh(y @ v + u)

    def loss(x: tf.Tensor) -> tf.Tensor:
        y = tf.while_loop(lambda i, _: i < 3, lambda i, h: (i + 1, tf.tanh(h @ w) + 0.1), (0, x))[1]
        return tf.reduce_mean(tf.reduce_sum(inner(y) ** 2, 1))

    return made(trained(loss, [w, v, u]), inputs(4))


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

    return made(trained(loss, [w, v, g]), inputs(4))
