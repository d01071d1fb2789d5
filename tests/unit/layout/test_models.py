"""Kinds in traced training steps of Keras models: losses, predictions, metrics."""

from __future__ import annotations

import time

import keras
import pytest
import tensorflow as tf
from keras import layers

from autodist.layout import Examples, Mean, PerExample, Replicated, Scalar, Unknown
from tests.unit.layout.graphs import traced
from tests.versions import since_keras

MEAN = Mean(Examples())
FROM_LOGITS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def floats(*shape):
    return tf.TensorSpec((None, *shape), tf.float32)


def integers(*shape):
    return tf.TensorSpec((None, *shape), tf.int32)


def sequential(*parts):
    return keras.Sequential(list(parts))


def kinds_of(model, loss, x, y):
    """Returns the kinds of the loss and of the prediction in a training step."""
    model.compile(optimizer="sgd", loss=loss)

    def step(features, labels):
        prediction = model(features, training=True)
        return [model.compute_loss(features, labels, prediction, training=True), prediction]

    found, outputs = traced(step, [x, y])
    return [found.kind(tensor.name) for tensor in outputs]


def attention(length):
    given = keras.Input((length, 16))
    seen = layers.MultiHeadAttention(2, 8, dropout=0.1)(given, given, use_causal_mask=True)
    return keras.Model(given, layers.Dense(4)(layers.LayerNormalization()(layers.Add()([given, seen]))))


MODELS = {
    "mlp": lambda: (
        sequential(keras.Input((10,)), layers.Dense(8, "relu"), layers.Dropout(0.3), layers.Dense(3)),
        FROM_LOGITS,
        floats(10),
        integers(),
    ),
    "regularized": lambda: (
        sequential(keras.Input((10,)), layers.Dense(8, "gelu", kernel_regularizer="l1l2"), layers.Dense(3, "softmax")),
        "sparse_categorical_crossentropy",
        floats(10),
        integers(),
    ),
    "separable": lambda: (
        sequential(
            keras.Input((8, 8, 4)),
            layers.SeparableConv2D(4, 3),
            layers.GroupNormalization(2),
            layers.DepthwiseConv2D(3),
            layers.SpatialDropout2D(0.2),
            layers.GlobalAveragePooling2D(),
            layers.Dense(3),
        ),
        "mae",
        floats(8, 8, 4),
        floats(3),
    ),
    "decoder": lambda: (
        sequential(
            keras.Input((4, 4, 3)),
            layers.Rescaling(0.1),
            layers.GaussianNoise(0.1),
            layers.Conv2DTranspose(4, 3),
            layers.UpSampling2D(),
            layers.ZeroPadding2D(),
            layers.Cropping2D(),
            layers.AveragePooling2D(2),
            layers.Reshape((-1,)),
            layers.Dense(3),
        ),
        "mse",
        floats(4, 4, 3),
        floats(3),
    ),
    "attention": lambda: (attention(7), "mse", floats(7, 16), floats(7, 4)),
    "attention, open length": lambda: (attention(None), "mse", floats(None, 16), floats(None, 4)),
    "averaged words": lambda: (
        sequential(
            keras.Input((None,)),
            layers.Embedding(50, 8, mask_zero=True),
            layers.GlobalAveragePooling1D(),
            layers.Dense(5),
        ),
        FROM_LOGITS,
        integers(None),
        integers(),
    ),
    "lstm": lambda: (
        sequential(keras.Input((12,)), layers.Embedding(50, 8), layers.LSTM(6), layers.Dense(5)),
        FROM_LOGITS,
        integers(12),
        integers(),
    ),
    "lstm, unrolled": lambda: (
        sequential(keras.Input((5,)), layers.Embedding(50, 8), layers.LSTM(6, unroll=True), layers.Dense(5)),
        FROM_LOGITS,
        integers(5),
        integers(),
    ),
    "gru, both ways": lambda: (
        sequential(keras.Input((None,)), layers.Embedding(50, 8), layers.Bidirectional(layers.GRU(6)), layers.Dense(5)),
        FROM_LOGITS,
        integers(None),
        integers(),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_mean_loss_stays_a_mean_through_a_model(name):
    kinds = kinds_of(*MODELS[name]())
    assert kinds == [MEAN, PerExample(0)]
    assert [kind.mixed_at for kind in kinds] == [None, None]


@since_keras("3.13", "means of masked losses without an epsilon in the divisor")
def test_a_masked_language_model_is_weighted_by_its_mask():
    model = sequential(
        keras.Input((None,)),
        layers.Embedding(50, 8, mask_zero=True),
        layers.LSTM(6, return_sequences=True),
        layers.Dense(50),
    )
    loss, prediction = kinds_of(model, FROM_LOGITS, integers(None), integers(None))
    assert isinstance(loss, Mean)
    assert isinstance(loss.weight, Scalar)
    assert prediction == PerExample(0)


@pytest.mark.parametrize(
    ("parts", "shape"),
    [
        ([layers.Dense(8), layers.BatchNormalization()], (10,)),
        ([layers.Conv2D(4, 3), layers.BatchNormalization(), layers.MaxPooling2D(), layers.Flatten()], (8, 8, 3)),
    ],
)
def test_batch_normalisation_is_said(parts, shape):
    model = sequential(keras.Input(shape), *parts, layers.ReLU(), layers.Dense(3))
    loss, prediction = kinds_of(model, "mse", floats(*shape), floats(3))
    assert [loss, prediction] == [MEAN, PerExample(0)]
    assert "batch_normalization" in loss.mixed_at
    assert "batch_normalization" in prediction.mixed_at


def test_sum_of_two_outputs_and_a_sum_beside_a_regularizer():
    given = keras.Input((6,))
    hidden = layers.Dense(4, kernel_regularizer="l2")(given)
    model = keras.Model(given, [layers.Dense(2)(hidden), layers.Dense(3)(hidden)])
    model.compile(optimizer="sgd", loss=["mse", "mae"], loss_weights=[1.0, 0.5])
    summed = keras.losses.MeanSquaredError(reduction="sum")

    def step(x, a, b):
        outputs = model(x, training=True)
        penalised = summed(a, outputs[0]) + sum(model.losses)
        return [model.compute_loss(x, [a, b], outputs, training=True), penalised]

    found, outputs = traced(step, [floats(6), floats(2), floats(3)])
    assert found.kind(outputs[0].name) == MEAN
    kind = found.kind(outputs[1].name)
    assert isinstance(kind, Unknown)
    assert "does not depend on the batch" in kind.reason


def test_metrics_that_are_read_after_their_write_are_replicated():
    metric = keras.metrics.Mean()
    metric.update_state(1.0)

    def step(x):
        metric.update_state(x)
        return [metric.result(), tf.reduce_mean(x)]

    found, outputs = traced(step, [floats()])
    assert [found.kind(tensor.name) for tensor in outputs] == [Replicated(), MEAN]


def test_a_large_step_is_analysed_in_a_moment():
    """As deep as the deepest networks, with half the nodes of a ResNet50 step."""
    weights = [tf.Variable(tf.eye(4)) for _ in range(200)]

    def step(x):
        with tf.GradientTape() as tape:
            for weight in weights:
                x = tf.nn.relu(x @ weight) + x
            loss = tf.reduce_mean(tf.square(x))
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(0.1 * gradient)
        return [loss]

    found, [loss] = traced(step, [floats(4)])
    assert len(loss.graph.get_operations()) > 3500
    began = time.process_time()
    assert found.kind(loss.name) == MEAN
    assert time.process_time() - began < 0.5
