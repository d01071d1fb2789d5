"""Steps that use cotangents: in functions that are not linear in them, or as data."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import tensorflow as tf

Step = Callable[[tf.Tensor], tf.Tensor | tuple[tf.Tensor, ...]]


@tf.custom_gradient
def clipped(x: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
    """Each example's gradient is made at most 0.05 long."""
    return tf.identity(x), lambda upstream: tf.clip_by_norm(upstream, 0.05, axes=[-1])


@tf.custom_gradient
def clipped_whole(x: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
    """The gradient is made at most 0.05 long, all of it together."""
    return tf.identity(x), lambda upstream: tf.clip_by_norm(upstream, 0.05)


@tf.custom_gradient
def capped(x: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
    """The gradient of a scalar is at most 0.05."""
    return tf.identity(x), lambda upstream: tf.minimum(upstream, 0.05)


def _weights() -> tf.Variable:
    return tf.Variable(np.linspace(-0.5, 1.0, 6).reshape(3, 2), name="w")


def _trained(loss_of: Callable[[tf.Tensor, tf.Tensor], tf.Tensor]) -> Step:
    """A step of gradient descent by a loss of the batch and the weights."""
    w = _weights()

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(x, w)
        w.assign_sub(0.1 * tape.gradient(loss, w))
        return loss

    return step


def _errors(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    return tf.square(tf.tanh(x @ w) - 1.0)


def _mean_error(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    return tf.reduce_mean(_errors(x, w))


def _by_input(x: tf.Tensor, of: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
    with tf.GradientTape() as tape:
        tape.watch(x)
        value = of(x)
    return tape.gradient(value, x)


def clip_per_example() -> Step:
    return _trained(lambda x, w: tf.reduce_mean(tf.square(clipped(x @ w) - 1.0)))


def clip_under_a_mask() -> Step:
    """The mean of those examples that a mask lets pass; some parts have none."""

    def loss_of(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
        mask = tf.cast(x[:, 0] > 0, x.dtype)
        return tf.reduce_sum(mask * tf.reduce_sum(tf.square(clipped(x @ w) - 1.0), 1)) / tf.reduce_sum(mask)

    return _trained(loss_of)


def clip_in_mean_and_sum() -> Step:
    def loss_of(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
        errors = tf.square(clipped(x @ w) - 1.0)
        return 0.3 * (tf.reduce_mean(errors) + 0.01 * tf.reduce_sum(errors))

    return _trained(loss_of)


def clip_gradient_of_weights() -> Step:
    return _trained(lambda x, w: tf.reduce_mean(tf.square(x @ clipped_whole(w) - 1.0)))


def adversarial() -> Step:
    """Trained on examples that were moved along the gradient of their mean loss."""
    return _trained(
        lambda x, w: _mean_error(x, w) + _mean_error(x + 5.0 * _by_input(x, lambda i: _mean_error(i, w)), w)
    )


def gradient_penalty() -> Step:
    """Returns a step with a gradient penalty: the norm of a mean's gradient by the examples."""

    def loss_of(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
        slope = tf.norm(_by_input(x, lambda i: tf.reduce_mean(tf.tanh(i @ w))), axis=1)
        return _mean_error(x, w) + tf.reduce_mean(tf.square(10.0 * slope - 1.0))

    return _trained(loss_of)


def virtual_adversarial() -> Step:
    """The direction in which a divergence of the batch grows, for each example separately (Miyato et al., 2018)."""

    def loss_of(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
        clean = tf.stop_gradient(tf.nn.softmax(x @ w))

        def divergence(noise: tf.Tensor) -> tf.Tensor:
            return tf.reduce_mean(tf.reduce_sum(clean * -tf.nn.log_softmax((x + noise) @ w), 1))

        noise = 3.0 * _by_input(0.1 * tf.sign(x), divergence)
        return _mean_error(x, w) + divergence(tf.stop_gradient(noise))

    return _trained(loss_of)


def in_two_calls() -> Step:
    """The backward pass in two calls: the second takes the cotangents of the first."""
    w, u = _weights(), tf.Variable(np.ones((2, 2)), name="u")

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape(persistent=True) as tape:
            hidden = tf.tanh(x @ w)
            loss = tf.reduce_mean(tf.square(hidden @ u - 1.0))
        by_hidden, by_u = tape.gradient(loss, hidden), tape.gradient(loss, u)
        w.assign_sub(tape.gradient(hidden, w, output_gradients=by_hidden))
        u.assign_sub(by_u)
        return loss

    return step


def through_a_mean() -> Step:
    """The second call starts at a mean, with the first call's cotangent of it."""
    w = _weights()

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape(persistent=True) as tape:
            mean = _mean_error(x, w)
            loss = tf.square(mean)
        w.assign_sub(tape.gradient(mean, w, output_gradients=tape.gradient(loss, mean)))
        return mean

    return step


def two_groups() -> Step:
    """A second group of gradients, scaled by the gradient of a masked mean of the first group's trained values."""
    w, u = _weights(), tf.Variable(np.ones((2, 2)), name="u")

    def step(x: tf.Tensor) -> tuple[tf.Tensor, ...]:
        with tf.GradientTape() as tape:
            first = _mean_error(x, w)
        w.assign_sub(0.1 * tape.gradient(first, w))
        hidden = tf.stop_gradient(x @ w)
        mask = tf.cast(hidden[:, 0] > -0.2, x.dtype)
        with tf.GradientTape() as tape:
            slope = _by_input(
                hidden,
                lambda h: tf.reduce_sum(mask * tf.reduce_sum(tf.square(h @ u), 1)) / (1e-9 + tf.reduce_sum(mask)),
            )
            second = tf.reduce_mean(tf.square((hidden + slope) @ u - 1.0))
        u.assign_sub(0.1 * tape.gradient(second, u))
        return first, second

    return step


def looked_at() -> Step:
    """Returns a number computed from the gradient by the examples, in addition to an update."""
    w = _weights()

    def step(x: tf.Tensor) -> tuple[tf.Tensor, ...]:
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            loss = _mean_error(x, w)
        steepness = tf.reduce_sum(tf.abs(tape.gradient(loss, x)))
        w.assign_sub(0.1 * tape.gradient(loss, w))
        return loss, steepness

    return step


def by_vectorized_map() -> Step:
    """Gradients of single examples, computed separately."""
    w = _weights()

    def step(x: tf.Tensor) -> tuple[tf.Tensor, ...]:
        def of_example(example: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(_errors(example[None], w))
            return tape.gradient(loss, w)

        lengths = tf.norm(tf.reshape(tf.vectorized_map(of_example, x), [-1, 6]), axis=1)
        with tf.GradientTape() as tape:
            loss = _mean_error(x, w)
        w.assign_sub(0.1 * tape.gradient(loss, w))
        return loss, tf.reduce_mean(lengths)

    return step


def plain() -> Step:
    return _trained(_mean_error)


def cap_gradient_of_penalty() -> Step:
    return _trained(lambda x, w: _mean_error(x, w) + capped(tf.reduce_sum(w * w)))
