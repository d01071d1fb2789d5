"""More steps of single ops for drawn shardings."""

from __future__ import annotations

import tensorflow as tf

from tests.unit.kernels.shard.drawn_steps import DrawnModel, inputs, made, trained, variable


def scatters() -> DrawnModel:
    """Writes to parts of tensors, and reads parts by computed indices."""
    w, v, u = variable("w", 4, 8), variable("v", 8, 4), variable("u", 2, 4, 8)

    def loss(x: tf.Tensor) -> tf.Tensor:
        y = x @ w
        rows = tf.tensor_scatter_nd_add(w, [[1], [3], [1]], u[0, :3])
        rows = tf.tensor_scatter_nd_update(rows, [[0]], u[1, :1])
        seen = tf.scatter_nd([[2], [0], [2], [1]], w, [4, 8]) + rows
        picked = tf.gather_nd(seen, [[0, 1], [2, 7], [3, 3], [1, 0]])
        best = tf.math.top_k(y, 3)
        chosen = tf.gather(y, best.indices, batch_dims=1) * best.values
        one_hot = tf.one_hot(tf.argmax(y, 1), 8, dtype=y.dtype) @ v
        both = tf.einsum("nd,kde,ke->nk", x, u, tf.reshape(v, [2, 16])[:, ::2])
        sums = tf.cumsum(y, 1, exclusive=True) * tf.cumsum(y, 1, reverse=True)
        parts = tf.math.unsorted_segment_sum(tf.transpose(y), [0, 1, 0, 1, 2, 2, 3, 3], 4)
        bands = tf.linalg.band_part(tf.einsum("nd,ne->nde", one_hot, picked[None] * x), 0, -1)
        found = [
            tf.reduce_sum(chosen, 1), tf.reduce_sum(both, 1), tf.reduce_sum(sums, 1), tf.reduce_sum(bands, [1, 2]),
            tf.reduce_sum(tf.transpose(parts) * one_hot, 1), tf.reduce_sum((x @ seen) ** 2, 1),
        ]  # fmt: skip
        return tf.reduce_mean(tf.add_n(found))

    return made(trained(loss, [w, v, u]), inputs(4))


def casts() -> DrawnModel:
    """Computes in float64 with values that are rounded to a lower precision in between."""
    w, v, b = variable("w", 4, 8), variable("v", 8, 4), variable("b", 4)

    def rounded(x: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
        return tf.cast(tf.cast(x, dtype), x.dtype)

    def loss(x: tf.Tensor) -> tf.Tensor:
        y = tf.tanh(rounded(x @ rounded(w, tf.bfloat16), tf.float32))
        y = rounded(y @ v, tf.bfloat16) + rounded(b, tf.float16)
        return tf.reduce_mean(tf.reduce_sum(y**2, 1))

    return made(trained(loss, [w, v, b]), inputs(4), by_replica=True)


def cached_keys() -> DrawnModel:
    """Attends to keys of a loop's cache, into which each turn writes, and to those of a variable."""
    q, k, out, past = (
        variable("q", 4, 2, 4),
        variable("k", 4, 2, 4),
        variable("out", 2, 4, 4),
        variable("past", 2, 2, 4),
    )

    def attend(x: tf.Tensor, keys: tf.Tensor, count: tf.Tensor | int) -> tf.Tensor:
        scores = tf.einsum("nhe,nshe->nhs", tf.einsum("nd,dhe->nhe", x, q), keys)
        scores += tf.where(tf.range(tf.shape(keys)[1]) < count, tf.constant(0.0, x.dtype), -1e9)
        return tf.einsum("nhs,nshe,hed->nd", tf.nn.softmax(scores), keys, out)

    def turn(at: tf.Tensor, x: tf.Tensor, cache: tf.Tensor) -> tuple[tf.Tensor, ...]:
        new = tf.einsum("nd,dhe->nhe", x, k)[:, None]
        cache = tf.concat([cache[:, :at], new, cache[:, at + 1 :]], 1)
        cache = tf.ensure_shape(cache, [None, 4, 2, 4])
        return at + 1, x + attend(x, cache, at + 1), cache

    def loss(x: tf.Tensor) -> tf.Tensor:
        start = tf.concat(
            [tf.tile(past[None], [tf.shape(x)[0], 1, 1, 1]), tf.zeros([tf.shape(x)[0], 2, 2, 4], x.dtype)], 1
        )
        x = x + attend(x, start[:, :2], 2)
        x, cache = tf.while_loop(lambda at, *_: at < 4, turn, (2, x, start))[1:]
        return tf.reduce_mean(0.1 * tf.reduce_sum(x**2, 1) + 0.1 * tf.reduce_sum(cache[:, 3] ** 2, [1, 2]))

    return made(trained(loss, [q, k, out, past]), inputs(4))


def draws() -> DrawnModel:
    """Draws by keys: dropout of activations and of a kernel, and noise; the key is a function of a counter."""
    w, v = variable("w", 4, 8), variable("v", 8, 4)
    turn = tf.Variable(3, name="turn", trainable=False)

    def loss(x: tf.Tensor) -> tf.Tensor:
        seed = tf.stack([turn, 7])
        kernel = tf.nn.experimental.stateless_dropout(w, 0.25, seed)
        y = x @ kernel + tf.random.stateless_normal([8], seed + 1, dtype=x.dtype)
        y = tf.nn.experimental.stateless_dropout(y, 0.25, seed + 2)
        y = tf.where(tf.random.stateless_uniform(tf.shape(y)[1:], seed + 3, dtype=x.dtype) < 0.3, y * 2.0, y)
        order = tf.random.experimental.stateless_shuffle(tf.range(8), seed + 4)
        return tf.reduce_mean(tf.reduce_sum((tf.gather(y, order, axis=1) @ v) ** 2, 1))

    inner = trained(loss, [w, v])

    def step(x: tf.Tensor) -> object:
        made = inner(x)
        turn.assign_add(1)
        return made

    return made(step, inputs(4), by_replica=True)


def averaged() -> DrawnModel:
    """Clips by the global norm, keeps averages of the weights, and decays the rate by the norms of both."""
    w, v, b = variable("w", 4, 8), variable("v", 8, 4), variable("b", 8)
    mean_w, mean_v = variable("mean_w", 4, 8, trainable=False), variable("mean_v", 8, 4, trainable=False)

    def step(x: tf.Tensor) -> tuple[tf.Tensor, ...]:
        with tf.GradientTape() as tape:
            y = tf.nn.relu(x @ w + b) @ v
            loss = tf.reduce_mean(tf.reduce_sum(y**2, 1)) + 0.1 * tf.nn.l2_loss(w) + 0.1 * tf.reduce_sum(tf.abs(v))
        found = tape.gradient(loss, [w, v, b])
        found, norm = tf.clip_by_global_norm(found, 0.3)
        found[0] = tf.clip_by_norm(tf.clip_by_value(found[0], -0.02, 0.02), 0.05, axes=[0])
        for one, of_one in zip((w, v, b), found, strict=True):
            ratio = tf.math.divide_no_nan(tf.norm(one), tf.norm(of_one))
            one.assign_sub(0.01 * tf.minimum(ratio, 10.0) * of_one)
        decay = tf.cast(0.9, x.dtype)
        for mean, one in ((mean_w, w), (mean_v, v)):
            mean.assign(decay * mean + (1.0 - decay) * one)
        return loss, norm, tf.linalg.global_norm([mean_w, mean_v])

    return made(step, inputs(4))
