"""Keras models for drawn shardings."""

from __future__ import annotations

from collections.abc import Callable

import keras
import tensorflow as tf

from tests.unit.kernels.shard.drawn_steps import DrawnModel, by_keras, ids, inputs, made


def dense(optimizer: Callable[[], keras.optimizers.Optimizer]) -> DrawnModel:
    def layers() -> keras.Model:
        x = keras.Input((4,))
        y = keras.layers.Dense(8, activation="gelu", name="up")(x)
        y = keras.layers.LayerNormalization(name="norm")(y)
        return keras.Model(x, keras.layers.Dense(4, name="down")(y))

    return made(by_keras(layers, optimizer), inputs(4))


def convolutions() -> DrawnModel:
    def layers() -> keras.Model:
        x = keras.Input((4, 4, 4))
        y = keras.layers.Conv2D(8, 3, padding="same", name="conv1")(x)
        y = keras.layers.BatchNormalization(name="norm")(y)
        y = keras.layers.MaxPooling2D(2, name="pool")(keras.layers.ReLU()(y))
        y = keras.layers.Conv2D(4, 2, name="conv2", padding="same")(y)
        return keras.Model(x, keras.layers.Dense(4, name="head")(keras.layers.Flatten()(y)))

    return made(by_keras(layers, lambda: keras.optimizers.SGD(1e-3)), inputs(4, 4, 4), by_replica=True)


def whole_norms() -> DrawnModel:
    """Like `convolutions` without statistics of the batch."""

    def layers() -> keras.Model:
        x = keras.Input((4, 4, 4))
        y = keras.layers.Conv2D(8, 3, padding="same", strides=2, name="conv1")(x)
        y = keras.layers.GroupNormalization(2, name="norm")(y)
        y = keras.layers.DepthwiseConv2D(2, padding="same", name="depth")(keras.layers.ReLU()(y))
        y = keras.layers.Conv2DTranspose(4, 2, name="conv2", padding="same")(y)
        return keras.Model(x, keras.layers.GlobalAveragePooling2D()(y))

    return made(by_keras(layers, lambda: keras.optimizers.SGD(1e-3)), inputs(4, 4, 4))


def recurrent(layer: Callable[..., keras.layers.Layer]) -> DrawnModel:
    def layers() -> keras.Model:
        x = keras.Input((3, 4))
        return keras.Model(x, keras.layers.Dense(4, name="head")(layer(4, name="loop")(x)))

    return made(by_keras(layers, lambda: keras.optimizers.SGD(0.05, momentum=0.9)), inputs(3, 4))


def attention() -> DrawnModel:
    def layers() -> keras.Model:
        x = keras.Input((3, 8))
        y = keras.layers.MultiHeadAttention(2, 4, name="att", dropout=0.3, flash_attention=False, seed=1)(x, x)
        y = keras.layers.LayerNormalization(name="norm")(keras.layers.Add()([x, y]))
        return keras.Model(x, keras.layers.Dropout(0.4, seed=2)(y))

    return made(by_keras(layers, lambda: keras.optimizers.Adam(0.01, epsilon=1e-3)), inputs(3, 8), by_replica=True)


def dropout() -> DrawnModel:
    def layers() -> keras.Model:
        x = keras.Input((4,))
        y = keras.layers.Dropout(0.4, seed=2)(keras.layers.Dense(8, name="up")(x))
        return keras.Model(x, keras.layers.Dense(4, name="down")(y))

    return made(by_keras(layers, lambda: keras.optimizers.SGD(0.05)), inputs(4), by_replica=True)


def embedding(optimizer: Callable[[], keras.optimizers.Optimizer]) -> DrawnModel:
    """A classifier of token sequences with repeated tokens, whose table has a sparse gradient."""
    keras.utils.set_random_seed(1)
    tokens = keras.Input((3,), dtype="int32")
    y = keras.layers.Embedding(8, 4, name="table")(tokens)
    y = keras.layers.RMSNormalization(name="norm")(y)
    y = keras.layers.Dense(8, name="logits")(keras.layers.Flatten()(y))
    model, updates = keras.Model(tokens, y), optimizer()
    updates.build(model.trainable_variables)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(x[:, 0], model(x, training=True))
        updates.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    return made(step, ids(3, 8))


def scaled() -> DrawnModel:
    """Scales the loss as Keras does, with gradients that are infinite at the second step."""
    keras.utils.set_random_seed(1)
    x = keras.Input((4,))
    y = keras.layers.Dense(4, name="down")(keras.layers.Dense(8, activation="exponential", name="up")(x))
    model = keras.Model(x, y)
    updates = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.01, momentum=0.9), initial_scale=8.0, dynamic_growth_steps=1
    )
    updates.build(model.trainable_variables)

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.reduce_sum(model(x) ** 2, 1))
            scaled = updates.scale_loss(loss)
        updates.apply(tape.gradient(scaled, model.trainable_variables), model.trainable_variables)
        return loss

    batches = inputs(4)
    batches[1] = batches[1] * 1e3
    return made(step, batches)


def regularized() -> DrawnModel:
    """Limits the norms of kernels after each update, and adds norms of weights to the loss."""
    keras.utils.set_random_seed(1)
    x = keras.Input((4,))
    y = keras.layers.Dense(
        8,
        name="up",
        kernel_constraint=keras.constraints.MaxNorm(0.5, axis=0),
        bias_constraint=keras.constraints.NonNeg(),
        kernel_regularizer=lambda kernel: 0.01 * tf.reduce_sum(tf.abs(kernel)),
    )(x)
    y = keras.layers.Dense(
        4,
        name="down",
        kernel_constraint=keras.constraints.UnitNorm(axis=1),
        kernel_regularizer=lambda kernel: 0.01 * tf.norm(kernel),
    )(y)
    model, updates = keras.Model(x, y), keras.optimizers.Adagrad(0.1)
    updates.build(model.trainable_variables)

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.reduce_sum((model(x) - 0.5) ** 2, 1))
            total = loss + tf.add_n(model.losses)
        updates.apply(tape.gradient(total, model.trainable_variables), model.trainable_variables)
        return total

    return made(step, inputs(4))


def bidirectional() -> DrawnModel:
    def layers() -> keras.Model:
        x = keras.Input((3, 4))
        y = keras.layers.Bidirectional(keras.layers.GRU(4, return_sequences=True), name="both")(x)
        y = keras.layers.SimpleRNN(4, name="simple", unroll=True)(y)
        return keras.Model(x, keras.layers.Dense(4, name="head")(y))

    return made(by_keras(layers, lambda: keras.optimizers.SGD(0.05)), inputs(3, 4))


def causal_attention() -> DrawnModel:
    """Grouped queries with a causal mask, over keys of the past and of the inputs."""

    def layers() -> keras.Model:
        x = keras.Input((4, 8))
        past = keras.layers.Dense(8, name="past")(x)
        y = keras.layers.GroupQueryAttention(2, 4, 2, name="att", flash_attention=False, use_bias=True)(
            x, keras.layers.Concatenate(axis=1)([past[:, :2], x[:, 2:]]), use_causal_mask=True
        )
        y = keras.layers.RMSNormalization(name="norm")(keras.layers.Add()([x, y]))
        y = keras.layers.EinsumDense("abc,cde->abde", (4, 2, 4), name="split")(y)
        y = keras.layers.EinsumDense("abde,dec->abc", (4, 8), name="join")(keras.layers.Activation("silu")(y))
        return keras.Model(x, y)

    return made(by_keras(layers, lambda: keras.optimizers.Adam(0.01, epsilon=1e-3)), inputs(4, 8))


def separable() -> DrawnModel:
    def layers() -> keras.Model:
        x = keras.Input((6, 4))
        y = keras.layers.SeparableConv1D(8, 3, name="conv1", padding="same")(x)
        y = keras.layers.UnitNormalization(axis=-1)(y)
        y = keras.layers.Conv1D(8, 3, padding="causal", dilation_rate=2, name="conv2")(y)
        y = keras.layers.PReLU(name="prelu", shared_axes=[1])(keras.layers.UpSampling1D(2)(y))
        y = keras.layers.AveragePooling1D(2)(y)
        y = keras.layers.Conv1DTranspose(4, 2, name="conv3", strides=2)(y)
        return keras.Model(x, keras.layers.GlobalMaxPooling1D()(y))

    return made(by_keras(layers, lambda: keras.optimizers.SGD(0.01)), inputs(6, 4))
