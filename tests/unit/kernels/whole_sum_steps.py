"""Steps with all-reduces inside the computation."""

from __future__ import annotations

from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

Step = Callable[..., object]


def normalisation(**options: object) -> keras.layers.BatchNormalization:
    return keras.layers.BatchNormalization(synchronized=True, dtype="float64", momentum=0.7, **options)


def dense(units: int, seed: int) -> keras.layers.Dense:
    return keras.layers.Dense(units, kernel_initializer=keras.initializers.GlorotUniform(seed), dtype="float64")


def trained(layers: list[keras.layers.Layer], width: int, rank: int = 2) -> Step:
    """A step of gradient descent on a sequence of layers; the loss is a mean over all of their outputs."""
    model = keras.Sequential([keras.Input([*[5] * (rank - 2), width], dtype="float64"), *layers])

    def step(x: tf.Tensor) -> tuple[tf.Tensor, ...]:
        with tf.GradientTape() as tape:
            made = model(x, training=True)
            loss = tf.reduce_mean(tf.square(made - 1.0) + 0.1 * made**3)
        gradients = tape.gradient(loss, model.trainable_variables)
        for variable, gradient in zip(model.trainable_variables, gradients, strict=True):
            variable.assign_sub(0.05 * gradient)
        return loss, made

    return step


def one_layer() -> Step:
    return trained([dense(4, 1), normalisation(), dense(2, 2)], 3)


def several_layers() -> Step:
    layers = [dense(4, 1), normalisation(), keras.layers.Activation("tanh", dtype="float64")]
    layers += [dense(4, 2), normalisation(scale=False), dense(3, 3), normalisation(center=False), dense(1, 4)]
    return trained(layers, 3)


def of_sequences() -> Step:
    return trained([dense(4, 1), normalisation(), dense(2, 2)], 3, rank=3)


def renormalised() -> Step:
    return trained([dense(4, 1), normalisation(renorm=True), dense(2, 2)], 3)


def masked() -> Step:
    """Returns a step whose moments exclude masked elements; parts of the batch may be masked completely."""
    layer, first, last = normalisation(), dense(4, 1), dense(2, 2)
    for made, width in ((first, 3), (layer, 4), (last, 4)):
        made.build([None, 5, width])
    variables = [*first.trainable_variables, *layer.trainable_variables, *last.trainable_variables]

    def step(x: tf.Tensor) -> tuple[tf.Tensor, ...]:
        mask = x[..., 0] > 3.5
        with tf.GradientTape() as tape:
            made = last(layer(first(x), training=True, mask=mask))
            loss = tf.reduce_mean(tf.square(made - 1.0))
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(0.05 * gradient)
        return loss, made

    return step


def penalised() -> Step:
    """Gradients by the examples, which go through the layer, are part of the loss."""
    model = keras.Sequential([keras.Input([3], dtype="float64"), dense(4, 1), normalisation(), dense(1, 2)])

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                inner.watch(x)
                made = model(x, training=True) ** 2
            slope = tf.norm(inner.gradient(made, x), axis=1)
            loss = tf.reduce_mean(made) + tf.reduce_mean((slope - 1.0) ** 2)
        gradients = outer.gradient(loss, model.trainable_variables)
        for variable, gradient in zip(model.trainable_variables, gradients, strict=True):
            variable.assign_sub(0.05 * gradient)
        return loss

    return step


def adversaries() -> Step:
    """Two networks, each trained on the other's updated outputs, with such layers in both."""
    maker = keras.Sequential([keras.Input([3], dtype="float64"), dense(4, 1), normalisation(), dense(3, 2)])
    judge = keras.Sequential([keras.Input([3], dtype="float64"), dense(4, 3), normalisation(), dense(1, 4)])

    def descend(model: keras.Model, loss_of: Callable[[], tf.Tensor]) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of()
        gradients = tape.gradient(loss, model.trainable_variables)
        for variable, gradient in zip(model.trainable_variables, gradients, strict=True):
            variable.assign_sub(0.05 * gradient)
        return loss

    def step(x: tf.Tensor) -> tuple[tf.Tensor, ...]:
        def of_judge() -> tf.Tensor:
            made = judge(maker(x, training=True), training=True)
            return tf.reduce_mean(tf.nn.softplus(-judge(x, training=True))) + tf.reduce_mean(tf.nn.softplus(made))

        def of_maker() -> tf.Tensor:
            return tf.reduce_mean(tf.nn.softplus(-judge(maker(x, training=True), training=True)))

        return descend(judge, of_judge), descend(maker, of_maker)

    return step


def masked_loss() -> Step:
    """One network's normalisation gives the mask of the loss, which masks the output of another, shallower network."""
    sees = keras.Sequential([keras.Input([3], dtype="float64"), normalisation(), dense(3, 5), normalisation()])
    model = keras.Sequential([keras.Input([3], dtype="float64"), dense(4, 1), normalisation(), dense(1, 2)])

    def step(x: tf.Tensor) -> tf.Tensor:
        mask = tf.cast(tf.stop_gradient(sees(x, training=True))[:, 0] > 0, tf.float64)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(mask * model(x, training=True)[:, 0] ** 2) / tf.reduce_sum(mask)
        gradients = tape.gradient(loss, model.trainable_variables)
        for variable, gradient in zip(model.trainable_variables, gradients, strict=True):
            variable.assign_sub(0.05 * gradient)
        return loss

    return step


def asked_of_distribute() -> Step:
    """A script's own sums over replicas; of gradients, too, which are whole anyway."""
    w = tf.Variable(np.linspace(-0.5, 1.0, 6).reshape(3, 2), name="w")

    def total(value: tf.Tensor) -> tf.Tensor:
        return tf.distribute.get_replica_context().all_reduce("SUM", value)

    def step(x: tf.Tensor) -> tuple[tf.Tensor, ...]:
        with tf.GradientTape() as tape:
            hidden = tf.tanh(x @ w)
            length, count = total([tf.reduce_sum(hidden**2, 0), tf.cast(tf.shape(x)[0], x.dtype)])
            loss = tf.reduce_mean((hidden / tf.sqrt(length / count + total(tf.constant(0.1, x.dtype))) - 1.0) ** 2)
        w.assign_sub(0.1 * total(tape.gradient(loss, w)))
        return loss, length

    return step


def mean_by_distribute(value: tf.Tensor) -> tf.Tensor:
    return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.MEAN, value)


def averaged_by_distribute() -> Step:
    """A script's own means over replicas: of a loss, of a penalty, which all replicas share, and of the result."""
    w = tf.Variable(np.linspace(-0.5, 1.0, 6).reshape(3, 2), name="w")

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = mean_by_distribute(tf.reduce_mean(tf.tanh(x @ w) ** 2)) + mean_by_distribute(tf.reduce_sum(w**2))
        w.assign_sub(0.1 * mean_by_distribute(tape.gradient(loss, w)))
        return mean_by_distribute(loss)

    return step


def centred_by_distribute() -> Step:
    """A mean over replicas that the loss combines with single examples."""
    w = tf.Variable(np.linspace(-0.5, 1.0, 6).reshape(3, 2), name="w")

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            hidden = tf.tanh(x @ w)
            loss = tf.reduce_mean((hidden - mean_by_distribute(tf.reduce_mean(hidden, 0))) ** 4)
        w.assign_sub(0.1 * tape.gradient(loss, w))
        return loss

    return step


def _descends(loss_of: Callable[[tf.Tensor], tf.Tensor], variables: list[tf.Variable]) -> Step:
    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(x)
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(0.05 * gradient)
        return loss

    return step


def _weights(*shapes: tuple[int, ...]) -> list[tf.Variable]:
    rng = np.random.default_rng(4)
    return [tf.Variable(rng.normal(size=shape), name=f"w{k}") for k, shape in enumerate(shapes)]


def gathered(rows: tf.Tensor, axis: int = 0) -> tf.Tensor:
    return tf.distribute.get_replica_context().all_gather(rows, axis=axis)


def contrasted() -> Step:
    """Contrasts each example with all others of the batch (SimCLR), at a trained temperature."""
    variables = first, second, heat = _weights((3, 4), (4, 2), ())

    def loss_of(x: tf.Tensor) -> tf.Tensor:
        one = tf.math.l2_normalize(tf.tanh(x @ first) @ second, 1)
        other = tf.math.l2_normalize(tf.tanh((x + 0.3) @ first) @ second, 1)
        one, other = gathered(one), gathered(other)
        logits = one @ tf.transpose(other) * tf.exp(heat)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.range(tf.shape(one)[0]), logits)
        return tf.reduce_mean(losses) + 0.01 * tf.reduce_sum(first**2)

    return _descends(loss_of, list(variables))


def contrasted_by_row() -> Step:
    """Each replica compares its own examples with those of all replicas, and each example has a further loss."""
    variables = first, second = _weights((3, 4), (4, 2))

    def loss_of(x: tf.Tensor) -> tf.Tensor:
        made = tf.tanh(x @ first) @ second
        near = tf.reduce_logsumexp(made @ tf.transpose(gathered(made)), 1)
        return tf.reduce_mean(near) + tf.reduce_mean(made**2)

    return _descends(loss_of, list(variables))


def decorrelated() -> Step:
    """A determinant of the covariances over the batch, along another axis than the first."""
    variables = (first,) = _weights((3, 2))

    def loss_of(x: tf.Tensor) -> tf.Tensor:
        made = gathered(tf.transpose(x @ first), axis=-1)
        centred = made - tf.reduce_mean(made, 1, keepdims=True)
        count = tf.cast(tf.shape(made)[1], tf.float64)
        covariances = centred @ tf.transpose(centred) / count + tf.eye(2, dtype=tf.float64)
        return -tf.linalg.logdet(covariances) + tf.reduce_mean(made**2)

    return _descends(loss_of, list(variables))


def hardest() -> Step:
    """Uses only the unmasked examples with the largest losses."""
    variables = (first,) = _weights((3, 1))

    def loss_of(x: tf.Tensor) -> tf.Tensor:
        kept = tf.boolean_mask(x, x[:, 0] < 5.0)
        losses = gathered(tf.squeeze(kept @ first, 1) ** 2)
        return tf.reduce_mean(tf.sort(losses, direction="DESCENDING")[:2])

    return _descends(loss_of, list(variables))


def attacked() -> Step:
    """The loss contains the gradient of a function of all examples, by the examples."""
    variables = (first,) = _weights((3, 2))

    def loss_of(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as inner:
            inner.watch(x)
            loss = tf.math.reduce_std(gathered(tf.tanh(0.2 * x @ first)))
        return tf.reduce_sum(inner.gradient(loss, x) ** 2) + loss

    return _descends(loss_of, list(variables))


def attacked_through_sums() -> Step:
    """The same of sums over all."""
    variables = (first,) = _weights((3, 2))

    def loss_of(x: tf.Tensor) -> tf.Tensor:
        context = tf.distribute.get_replica_context()
        with tf.GradientTape() as inner:
            inner.watch(x)
            sums = tf.reduce_sum(tf.tanh(0.2 * x @ first) ** 2, 0)
            loss = tf.reduce_sum(tf.sqrt(context.all_reduce(tf.distribute.ReduceOp.SUM, sums)))
        return tf.reduce_sum(inner.gradient(loss, x) ** 2) + loss

    return _descends(loss_of, list(variables))


def standardised() -> Step:
    """Returns a step without gradients through the reduction: advantages by the batch's mean and deviation."""
    variables = (first,) = _weights((3, 2))

    def loss_of(x: tf.Tensor) -> tf.Tensor:
        gains = x[:, 1]
        whole = gathered(gains)
        gains = (gains - tf.reduce_mean(whole)) / (tf.math.reduce_std(whole) + 1e-8)
        return -tf.reduce_mean(gains * tf.nn.log_softmax(x @ first)[:, 0])

    return _descends(loss_of, list(variables))
