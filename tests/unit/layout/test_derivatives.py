"""Gradients within a loss: gradients of examples are rows, gradients of parameters are sums."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf

from autodist.layout import Examples, Mean, PerExample, Replicated, Sum, Unknown
from tests.unit.layout.batches import SIZES
from tests.unit.layout.graphs import Case

Made = Callable[[tf.Tensor], tf.Tensor]


@pytest.fixture
def case():
    built = Case()
    with built.graph.as_default():
        built.batch("v", 6)
        built.batch("image", 8, 8, 3, dtype=tf.float32)
        yield built


@pytest.fixture
def feeds():
    rng = np.random.default_rng(3)
    images = rng.uniform(0.2, 1, (sum(SIZES), 8, 8, 3)).astype(np.float32)
    return {"v": rng.uniform(0.5, 2, (sum(SIZES), 6)), "image": images}


def padded(image: tf.Tensor, **options: str) -> tf.Tensor:
    return tf.pad(image, [[0, 0], [1, 1], [2, 1], [0, 0]], **options)


def normalised(image: tf.Tensor) -> tf.Tensor:
    scale, offset, mean, variance = tf.constant([1.0, 2, 3]), tf.zeros(3), tf.zeros(3), tf.ones(3)
    normal = tf.compat.v1.nn.fused_batch_norm(image, scale, offset, mean, variance, is_training=False)
    return normal[0]


def layer_normalised(image: tf.Tensor) -> tf.Tensor:
    """The fused layer normalisation of tf_keras, whose channels are the vectors of all examples."""
    shape = tf.shape(image)
    vectors = tf.reduce_prod(shape[:3])
    value = tf.reshape(image, [1, vectors, shape[3], 1])
    normal = tf.compat.v1.nn.fused_batch_norm(value, tf.ones([vectors]), tf.zeros([vectors]), data_format="NCHW")
    return tf.reshape(normal[0], shape) * tf.constant([1.0, 2, 3])


PENALISED: dict[str, Made] = {
    "dense": lambda v: tf.tanh(v @ tf.ones([6, 3], v.dtype)) @ tf.ones([3, 1], v.dtype),
    **{
        name: lambda v, f=f: f(v @ tf.linspace(tf.ones([6], v.dtype), -tf.ones([6], v.dtype), 3, axis=1))
        for name, f in {
            "sigmoid": tf.sigmoid,
            "relu": tf.nn.relu,
            "elu": tf.nn.elu,
            "selu": tf.nn.selu,
            "leaky relu": tf.nn.leaky_relu,
            "softplus": tf.nn.softplus,
            "softsign": tf.nn.softsign,
            "relu6": tf.nn.relu6,
        }.items()
    },
    "roots": lambda v: tf.sqrt(v) + tf.math.rsqrt(v) + tf.math.reciprocal(v) + 1 / tf.square(v),
    "normalised": lambda v: (v - tf.reduce_mean(v, 1, keepdims=True)) / tf.norm(v, axis=1, keepdims=True),
    "columns": lambda v: v[:, 1:4] ** 2 * v[:, :3] * v[:, 5:],
    "concatenated": lambda v: tf.concat([v, v * v, v[:, :2]], 1) ** 2,
    "concatenated with what is no batch's": lambda v: tf.concat([v, tf.ones([tf.shape(v)[0], 2], v.dtype)], -1) ** 2,
    "padded": lambda v: tf.pad(v, [[0, 0], [1, 2]]) ** 2,
}
OF_IMAGES: dict[str, Made] = {
    "pooled": lambda image: tf.nn.max_pool2d(tf.nn.avg_pool2d(image * image, 2, 2, "VALID"), 2, 2, "VALID"),
    "convolved": lambda image: tf.tanh(tf.nn.bias_add(tf.nn.conv2d(image, tf.ones([3, 3, 3, 2]), 2, "SAME"), [0.1, 1])),
    "padded with zeros": lambda image: tf.tanh(tf.nn.conv2d(padded(image), tf.ones([3, 3, 3, 2]), 2, "VALID")),
    "padded with its mirror": lambda image: padded(image, mode="REFLECT") ** 2,
    "channels joined": lambda image: tf.concat([image, image * image], 3) ** 2,
    "enlarged": lambda image: tf.image.resize(image, [16, 16], "nearest") ** 2 * tf.image.resize(image, [16, 16]),
    "layer normalised": lambda image: layer_normalised(image) ** 2,
    "normalised as in inference": lambda image: normalised(image) ** 2,
}


@pytest.mark.parametrize("name", PENALISED | OF_IMAGES)
def test_a_penalty_on_gradients_is_a_mean(case, feeds, name):
    """As in a WGAN critic's gradient penalty: each example has its own gradient."""
    value = case.graph.get_tensor_by_name("image:0" if name in OF_IMAGES else "v:0")
    [slope] = tf.gradients(tf.reduce_sum((PENALISED | OF_IMAGES)[name](value)), value)
    length = tf.sqrt(tf.reduce_sum(tf.square(slope), list(range(1, slope.shape.rank))) + 1e-6)
    penalty = tf.reduce_mean(tf.square(length - 1))
    kinds = case.assert_joins([slope, penalty], feeds, SIZES, rtol=1e-4 if value.dtype == tf.float32 else 1e-9)
    assert kinds == [PerExample(0), Mean(Examples())]


@pytest.mark.parametrize("name", ["dense", "columns", "concatenated", "padded"])
def test_second_derivatives_by_inputs_are_each_examples_own(case, feeds, name):
    """As in a network that solves a differential equation."""
    v = case.graph.get_tensor_by_name("v:0")
    joined = tf.concat([v[:, :4], v[:, 3:]], 1)
    [slope] = tf.gradients(tf.reduce_sum(tf.tanh(PENALISED[name](joined[:, 1:]))), v)
    [curvature] = tf.gradients(slope[:, :1], v)
    rest = curvature[:, 1:2] + slope
    assert case.assert_joins([rest, tf.reduce_mean(rest**2)], feeds, SIZES, 1e-9) == [PerExample(0), Mean(Examples())]


def test_a_gradient_of_a_second_derivative_by_weights_is_a_sum(case, feeds):
    """As for a network times a function of its inputs that is zero on the boundary."""
    v = case.graph.get_tensor_by_name("v:0")
    x, weights = v[:, :1], tf.constant([[0.7]], v.dtype)
    [slope] = tf.gradients((1 - x**2) * tf.tanh(x @ weights), x)
    [curvature] = tf.gradients(slope, x)
    [gradient] = tf.gradients(tf.reduce_sum(curvature**2), weights)
    assert case.assert_joins([gradient], feeds, SIZES, rtol=1e-9) == [Sum()]


def test_gradients_of_filters_and_biases_are_sums(case, feeds):
    images = case.graph.get_tensor_by_name("image:0")
    filters, bias = tf.ones([3, 3, 3, 2]), tf.constant([0.1, 1.0])
    made = tf.square(tf.nn.bias_add(tf.nn.conv2d(images, filters, 2, "SAME"), bias))
    gradients = tf.gradients(tf.reduce_sum(made), [filters, bias])
    assert case.assert_joins(gradients, feeds, SIZES, rtol=1e-4) == [Sum(), Sum()]


def test_gradients_of_what_is_repeated_for_each_example_and_of_parts_of_weights_are_sums(case, feeds):
    """As for a loss weight in the gradient of a mean, and for one of several weights stored in one variable."""
    v = case.graph.get_tensor_by_name("v:0")
    scale, weights = tf.constant([[2.0]], v.dtype), tf.constant([1.0, 2.0], v.dtype)
    made = tf.reduce_sum(tf.tile(scale, tf.shape(v)) * v**2 * weights[0])
    assert case.assert_joins(tf.gradients(made, [scale, weights]), feeds, SIZES, rtol=1e-9) == [Sum(), Sum()]


@pytest.mark.parametrize(
    "made",
    [lambda v: v[:3] ** 2, lambda v: tf.slice(v, [1, 0], [3, 6]) ** 2, lambda v: tf.concat([v, v * v], 0) ** 2],
    ids=["some rows", "some rows, by their number", "rows behind rows"],
)
def test_of_rows_that_are_taken_by_their_position_nothing_is_known(case, made):
    v = case.graph.get_tensor_by_name("v:0")
    [slope] = tf.gradients(tf.reduce_sum(made(v)), v, unconnected_gradients="zero")
    assert isinstance(case.kind(slope), Unknown)


def test_where_the_parts_of_a_concatenation_begin_is_known_along_all_axes_but_the_batchs(case):
    v = case.graph.get_tensor_by_name("v:0")
    shapes = tf.shape_n([v, v, v])
    columns, rows = (tf.raw_ops.ConcatOffset(concat_dim=axis, shape=shapes) for axis in (1, 0))
    assert [case.kind(offset) for offset in columns] == [Replicated()] * 3
    assert case.kind(rows[0]) == Replicated()
    assert all("begins where" in case.kind(offset).reason for offset in rows[1:])
