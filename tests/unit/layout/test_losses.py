"""Losses of Keras 3, tf_keras and TF1 with reductions, masks and weights: kinds, checked numerically."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from autodist.layout import Examples, Mean, PerExample, Scalar, Sum, Unknown
from tests.unit.layout.graphs import Case
from tests.versions import since_keras

MEAN = Mean(Examples())
SIZES = (1, 4, 2)
BATCH = sum(SIZES)
V1 = tf.compat.v1.losses


@pytest.fixture(autouse=True)
def in_float64():
    for backend in (keras.config, tf_keras.backend):
        backend.set_floatx("float64")
    yield
    for backend in (keras.config, tf_keras.backend):
        backend.set_floatx("float32")


@pytest.fixture
def case():
    """Sequences `s` and `goal`, classes `p`, `label` and `hot`, with weights and masks for each."""
    built = Case()
    with built.graph.as_default():
        for name in ("s", "goal"):
            built.batch(name, None, 4)
        for name in ("p", "hot"):
            built.batch(name, 4)
        built.batch("label", dtype=tf.int64)
        built.batch("weight")
        built.batch("weights", None)
        built.batch("mask", None, dtype=tf.bool)
        yield built


@pytest.fixture
def feeds():
    rng = np.random.default_rng(5)
    label = rng.integers(0, 4, BATCH)
    weight = rng.uniform(0.1, 2, BATCH)
    weight[3] = 0
    p = rng.uniform(0.05, 0.95, (BATCH, 4))
    return {
        "s": rng.normal(size=(BATCH, 5, 4)),
        "goal": rng.normal(size=(BATCH, 5, 4)),
        "p": p / p.sum(-1, keepdims=True),
        "hot": np.eye(4)[label],
        "label": label,
        "weight": weight,
        "weights": rng.uniform(0.1, 2, (BATCH, 5)),
        "mask": rng.uniform(size=(BATCH, 5)) > 0.4,
    }


def tensor(case, name):
    return case.graph.get_tensor_by_name(f"{name}:0")


def matches(kind, expected):
    return isinstance(kind, Mean) and isinstance(kind.weight, Scalar) if expected is Scalar else kind == expected


def check(case, feeds, loss, expected, rtol=1e-12):
    [kind] = case.assert_joins([loss], feeds, SIZES, rtol)
    assert matches(kind, expected), kind


# `with_global_statistics` makes losses of earlier versions exact.
MASKED = since_keras("3.13", "means of masked losses without an epsilon in the divisor")
KERAS_KINDS = [
    ("sum_over_batch_size", None, False, MEAN),
    ("sum_over_batch_size", "weights", False, MEAN),
    pytest.param("sum_over_batch_size", None, True, Scalar, marks=MASKED),
    pytest.param("sum_over_batch_size", "weights", True, Scalar, marks=MASKED),
    pytest.param("mean", "weights", True, Scalar, marks=MASKED),
    ("mean_with_sample_weight", None, False, MEAN),
    ("mean_with_sample_weight", "weights", False, Scalar),
    ("mean_with_sample_weight", None, True, Scalar),
    ("mean_with_sample_weight", "weights", True, Scalar),
    ("sum", "weights", True, Sum()),
    ("sum", None, False, Sum()),
    ("none", "weights", True, PerExample(0)),
]


@pytest.mark.parametrize(("reduction", "weights", "masked", "expected"), KERAS_KINDS)
@pytest.mark.parametrize("name", ["MeanSquaredError", "Huber", "CosineSimilarity", "LogCosh"])
def test_keras_losses_of_sequences(case, feeds, name, reduction, weights, masked, expected):
    prediction = tensor(case, "s")
    if masked:
        prediction._keras_mask = tensor(case, "mask")
    loss = getattr(keras.losses, name)(reduction=reduction)
    weight = tensor(case, weights) if weights else None
    check(case, feeds, loss(tensor(case, "goal"), prediction, sample_weight=weight), expected)


CLASSES = [
    "BinaryCrossentropy",
    "BinaryFocalCrossentropy",
    "CategoricalCrossentropy",
    "CategoricalFocalCrossentropy",
    "CategoricalHinge",
    "KLDivergence",
    "MeanAbsoluteError",
    "MeanAbsolutePercentageError",
    "MeanSquaredLogarithmicError",
    "Poisson",
]


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize(
    ("reduction", "weight", "expected"),
    [
        ("sum_over_batch_size", None, MEAN),
        ("sum_over_batch_size", "weight", MEAN),
        ("mean_with_sample_weight", "weight", Scalar),
        ("sum", "weight", Sum()),
        ("none", None, PerExample(0)),
    ],
)
def test_keras_losses_of_classes(case, feeds, name, reduction, weight, expected):
    loss = getattr(keras.losses, name)(reduction=reduction)
    given = tensor(case, weight) if weight else None
    check(case, feeds, loss(tensor(case, "hot"), tensor(case, "p"), sample_weight=given), expected)


@pytest.mark.parametrize("from_logits", [True, False])
@pytest.mark.parametrize(("weight", "expected"), [(None, MEAN), ("weight", MEAN)])
def test_keras_sparse_cross_entropy(case, feeds, from_logits, weight, expected):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=from_logits)
    given = tensor(case, weight) if weight else None
    check(case, feeds, loss(tensor(case, "label"), tensor(case, "p"), sample_weight=given), expected)


@pytest.mark.parametrize("is_sparse", [True, False], ids=["sparse", "dense"])
def test_a_cross_entropy_of_logits_of_an_op_without_a_rule_says_so(case, is_sparse):
    strange = tf.numpy_function(lambda v: v, [tensor(case, "p")], tf.float64)
    logits = tf.ensure_shape(strange, [None, 4])
    if is_sparse:
        made = tf.raw_ops.SparseSoftmaxCrossEntropyWithLogits(features=logits, labels=tensor(case, "label"))
    else:
        made = tf.raw_ops.SoftmaxCrossEntropyWithLogits(features=logits, labels=tensor(case, "hot"))
    kinds = [case.kind(value) for value in (*made, tf.reduce_mean(made.loss))]
    assert kinds == [PerExample(0), PerExample(0), MEAN]
    assert [kind.mixed_at for kind in kinds] == [made.loss.op.name] * 3


def test_sequences_whose_length_one_side_alone_tells(case, feeds):
    """As for a tensor written by a loop with one iteration per word."""
    words = case.batch("words", 5, dtype=tf.int64)
    feeds["words"] = np.random.default_rng(6).integers(0, 4, (BATCH, 5))
    each = tf.nn.sparse_softmax_cross_entropy_with_logits(words, tensor(case, "s"))
    counted = tf.cast(words > 0, tf.float64)
    check(case, feeds, each, PerExample(0))
    check(case, feeds, tf.reduce_sum(each * counted) / tf.reduce_sum(counted), Scalar)
    flat = tf.reshape(tensor(case, "s"), [-1, 4])
    check(case, feeds, tf.math.unsorted_segment_sum(flat, tf.reshape(words, [-1]), 4), Sum())


@pytest.mark.parametrize("name", ["Dice", "Tversky"])
def test_keras_losses_over_the_whole_batch_are_unknown(case, name):
    loss = getattr(keras.losses, name)()(tensor(case, "hot"), tensor(case, "p"))
    assert isinstance(case.kind(loss), Unknown)


def test_a_hinge_that_looks_at_all_labels_says_so(case):
    """It converts labels if all labels of the shard are 0 or 1: examples of a shard interact."""
    kind = case.kind(keras.losses.Hinge()(tensor(case, "hot"), tensor(case, "p")))
    assert kind == MEAN
    assert "cond" in kind.mixed_at


TF_KERAS_KINDS = [("sum_over_batch_size", MEAN), ("auto", MEAN), ("sum", Sum()), ("none", PerExample(0))]


@pytest.mark.parametrize(("reduction", "expected"), TF_KERAS_KINDS)
@pytest.mark.parametrize("weights", [None, "weights"])
@pytest.mark.parametrize("name", ["MeanSquaredError", "Huber", "CosineSimilarity"])
def test_tf_keras_losses_of_sequences(case, feeds, name, weights, reduction, expected):
    loss = getattr(tf_keras.losses, name)(reduction=reduction)
    weight = tensor(case, weights) if weights else None
    check(case, feeds, loss(tensor(case, "goal"), tensor(case, "s"), sample_weight=weight), expected)


@pytest.mark.parametrize(("reduction", "expected"), TF_KERAS_KINDS)
@pytest.mark.parametrize("weight", [None, "weight"])
def test_tf_keras_losses_of_classes(case, feeds, weight, reduction, expected):
    given = tensor(case, weight) if weight else None
    sparse = tf_keras.losses.SparseCategoricalCrossentropy(reduction=reduction)
    binary = tf_keras.losses.BinaryCrossentropy(reduction=reduction)
    check(case, feeds, sparse(tensor(case, "label"), tensor(case, "p"), sample_weight=given), expected)
    check(case, feeds, binary(tensor(case, "hot"), tensor(case, "p"), sample_weight=given), expected)


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [
        (V1.Reduction.SUM, Sum()),
        (V1.Reduction.MEAN, Scalar),
        (V1.Reduction.SUM_BY_NONZERO_WEIGHTS, Scalar),
        (V1.Reduction.SUM_OVER_BATCH_SIZE, MEAN),
        (V1.Reduction.NONE, PerExample(0)),
    ],
)
@pytest.mark.parametrize("weighted", [False, True])
def test_losses_of_tensorflow_1(case, feeds, reduction, expected, weighted):
    """They compute in float32 for any input dtype."""
    weight = tensor(case, "weight") if weighted else 1.0
    options = {"weights": weight, "reduction": reduction}
    column = {**options, "weights": weight[:, None] if weighted else 1.0}
    losses = [
        V1.sparse_softmax_cross_entropy(tensor(case, "label"), tensor(case, "p"), **options),
        V1.softmax_cross_entropy(tensor(case, "hot"), tensor(case, "p"), **options),
        V1.mean_squared_error(tensor(case, "hot"), tensor(case, "p"), **column),
        V1.sigmoid_cross_entropy(tensor(case, "hot"), tensor(case, "p"), **column),
    ]
    for loss in losses:
        check(case, feeds, loss, expected, rtol=1e-6)


def test_average_loss_over_a_stated_batch_is_a_sum(case, feeds):
    rows = tf.reduce_mean(tf.square(tensor(case, "s")), [1, 2])
    check(case, feeds, tf.reduce_sum(rows) / BATCH, Sum())
    check(case, feeds, tf.reduce_sum(rows) * (1.0 / BATCH), Sum())


def test_weights_of_classes(case, feeds):
    """The code that Keras generates for `class_weight`: a weight looked up for each label."""
    by_class = tf.constant([0.2, 1.0, 3.0, 0.5], tf.float64)
    weight = tf.gather(by_class, tensor(case, "label"))
    loss = keras.losses.SparseCategoricalCrossentropy()
    check(case, feeds, loss(tensor(case, "label"), tensor(case, "p"), sample_weight=weight), MEAN)
