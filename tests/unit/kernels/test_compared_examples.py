"""Losses that compare the examples of a batch with one another train as on one device, without changes."""

from __future__ import annotations

import logging
from collections.abc import Callable

import keras
import numpy as np
import pytest
import tensorflow as tf

from autodist import AutoDist, ResourceSpec
from autodist.graph.parts import PendingReductionKind
from autodist.kernels import Context, rewrite
from tests.unit.kernels.in_one_process import assert_same, capture, one_device, plan, train
from tests.unit.kernels.pairs import pairs

Loss = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]
"""A function of the model's outputs for the examples, and of the examples themselves."""

SCALE = tf.Variable(1.5, dtype=tf.float64, name="scale")


def stepping(loss: Loss, *others: tf.Variable) -> Callable[[tf.Tensor], tf.Tensor]:
    rng = np.random.default_rng(1)
    trained = [tf.Variable(rng.normal(size=shape), name=name) for shape, name in (((3, 4), "a"), ((4, 2), "b"))] + list(
        others
    )

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            value = loss(tf.tanh(x @ trained[0]) @ trained[1], x)
        for variable, gradient in zip(trained, tape.gradient(value, trained), strict=True):
            variable.assign_sub(0.1 * gradient)
        return value

    return step


def labels_of(x: tf.Tensor) -> tf.Tensor:
    return tf.cast(x[:, 0] > 3.0, tf.int32)


def supervised_contrastive(made: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    """The positives of an example are those of its class (arXiv 2004.11362)."""
    made, labels = tf.math.l2_normalize(made, 1), labels_of(x)[:, None]
    alike = tf.cast(tf.equal(labels, tf.transpose(labels)), made.dtype)
    alike /= tf.reduce_sum(alike, 1, keepdims=True)
    logits = tf.matmul(made, made, transpose_b=True) / 0.5
    return tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits(alike, logits))


def two_views(made: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    """As SimCLR: the other view of each example among both views of all (arXiv 2002.05709)."""
    one, other = tf.math.l2_normalize(made, 1), tf.math.l2_normalize(tf.sin(made), 1)
    count = tf.shape(one)[0]
    labels = tf.one_hot(tf.range(count), 2 * count, dtype=made.dtype)
    masks = tf.eye(count, dtype=made.dtype) * 1e9
    apart = tf.concat([one @ tf.transpose(other), one @ tf.transpose(one) - masks], 1)
    return tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits(labels, apart))


def texts_and_images(made: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    """As CLIP, with a learned temperature (arXiv 2103.00020)."""
    logits = made @ tf.transpose(x[:, :2]) * tf.exp(SCALE) * 0.1
    labels = tf.range(tf.shape(logits)[0])
    ways = [tf.nn.sparse_softmax_cross_entropy_with_logits(labels, k) for k in (logits, tf.transpose(logits))]
    return (tf.reduce_mean(ways[0]) + tf.reduce_mean(ways[1])) / 2.0


def hardest_triplets(made: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    """The farthest example of the same class and the nearest of another (arXiv 1703.07737)."""
    labels = labels_of(x)
    squares = tf.reduce_sum(tf.square(made[:, None] - made[None]), 2)
    alike = tf.cast(labels[:, None] == labels[None], made.dtype)
    far, near = tf.reduce_max(squares * alike, 1), tf.reduce_min(squares + 1e3 * alike, 1)
    return tf.reduce_mean(tf.nn.relu(far - near + 1.0))


def ranked_pairs(made: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    """As RankNet: for each pair, the better one is to score more."""
    scores, truth = made[:, 0], x[:, 0]
    better = tf.cast(truth[:, None] > truth[None], made.dtype)
    losses = tf.nn.softplus(scores[None] - scores[:, None]) * better
    return tf.math.divide_no_nan(tf.reduce_sum(losses), tf.reduce_sum(better))


def partial_likelihood(made: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    """Cox's: each event beside all that are at risk then, which are those after it in the order of time."""
    order = tf.argsort(x[:, 1], direction="DESCENDING")
    risks, events = tf.gather(made[:, 0], order), tf.gather(tf.cast(x[:, 2] > 3.0, made.dtype), order)
    among = tf.math.log(tf.cumsum(tf.exp(risks)))
    return -tf.math.divide_no_nan(tf.reduce_sum((risks - among) * events), tf.reduce_sum(events))


def sorted_errors(made: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    """As Lovász's extension of the Jaccard index: sorted hinges, times the growth of the index (arXiv 1705.08790)."""
    truth = tf.cast(labels_of(x), made.dtype)
    errors = 1.0 - made[:, 0] * (2.0 * truth - 1.0)
    errors, order = tf.math.top_k(errors, tf.shape(errors)[0])
    truth = tf.gather(truth, order)
    total = tf.reduce_sum(truth)
    index = 1.0 - (total - tf.cumsum(truth)) / (total + tf.cumsum(1.0 - truth) + 1e-9)
    growth = tf.concat([index[:1], index[1:] - index[:-1]], 0)
    return tf.tensordot(tf.nn.relu(errors), tf.stop_gradient(growth), 1)


def beside_other_terms(made: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    """A mean over examples, one over pairs and one of a variable."""
    return tf.reduce_mean(tf.square(made)) + 0.5 * supervised_contrastive(made, x) + 0.1 * tf.square(SCALE)


def smooth_maximum(made: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    """Reads the shape of a scalar that is computed from trained variables: an empty tensor, but not a layer's."""
    return tf.reduce_logsumexp(tf.reduce_sum(tf.square(made - x[:, :1]), 1))


def asserted(made: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    """With assertions on the pairs, as Keras 2 makes them of sample weights, and a check of the numbers."""
    logits, weights = tf.matmul(made, made, transpose_b=True), tf.abs(x[:, 1])
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.range(tf.shape(made)[0]), logits)
    with tf.control_dependencies(
        [
            tf.debugging.assert_equal(tf.shape(losses), tf.shape(weights)),
            tf.cond(tf.shape(logits)[1] > 99, lambda: tf.print("large"), tf.no_op),
        ]
    ):
        return tf.reduce_mean(tf.debugging.check_numerics(losses, "loss") * weights)


def hard_negatives(made: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    """As SSD: all positives, and three times as many negatives of the largest losses (arXiv 1512.02325)."""
    losses, positive = tf.reduce_sum(made**2, 1), tf.cast(x[:, 0] > 4.0, made.dtype)
    most = tf.cast(3 * tf.reduce_sum(positive), tf.int32)
    negatives = losses * (1 - positive)
    sorted_negatives, _ = tf.math.top_k(negatives, tf.shape(negatives)[0])
    kept = tf.cast(tf.range(tf.shape(negatives)[0]) < most, made.dtype)
    total = tf.reduce_sum(losses * positive) + tf.reduce_sum(sorted_negatives * kept)
    return total / tf.maximum(tf.reduce_sum(positive), 1)


@tf.custom_gradient
def closeness(rows: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
    """Kernels of all pairs; the gradient reads the argument, and is one for it."""
    apart = rows[:, None] - rows[None]
    kernels = tf.exp(-tf.reduce_sum(tf.square(apart), 2))

    def backward(upstream: tf.Tensor) -> tf.Tensor:
        both = (upstream + tf.transpose(upstream)) * kernels
        return 2.0 * (both @ rows - tf.reduce_sum(both, 1, keepdims=True) * rows)

    return kernels, backward


def by_a_custom_gradient(made: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    return tf.reduce_mean(closeness(tf.sin(made)) * tf.abs(x[:, :1]))


def by_a_custom_gradient_of_an_input(made: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    return tf.reduce_mean(closeness(tf.identity(x)) * tf.abs(tf.sin(made[:, :1])))


LOSSES = [
    by_a_custom_gradient,
    by_a_custom_gradient_of_an_input,
    hard_negatives,
    smooth_maximum,
    supervised_contrastive,
    two_views,
    texts_and_images,
    hardest_triplets,
    ranked_pairs,
    partial_likelihood,
    sorted_errors,
    beside_other_terms,
    asserted,
]


@pytest.mark.feature("function", "loss: compares examples with one another")
@pytest.mark.parametrize("loss, shape", pairs(LOSSES, [(1, 3), (2, 2)]), ids=lambda v: getattr(v, "__name__", str(v)))
def test_they_see_the_whole_batch(loss: Loss, shape: tuple[int, int], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "autodist")
    step = stepping(loss, *([SCALE] if loss in (texts_and_images, beside_other_terms) else []))
    rng = np.random.default_rng(0)
    data = [(rng.normal(3.0, 2.0, size=(n, 3)),) for n in (8, 7, 3)]
    captured = capture(step, *data[0], is_split=True)
    assert captured.step.in_step_all_reduces
    assert_same(train(captured, plan(captured.step, *shape), data), one_device(captured, step, data), 1e-10)
    logged = [message for message in caplog.messages if "compares examples with one another" in message]
    assert len(logged) == 1 and not any("treated as a mean" in message for message in caplog.messages)


def with_a_layer(made: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    """Scores pairs by trained weights: a layer that each replica would compute for all pairs."""
    apart = tf.square(made[:, None] - made[None])
    return tf.reduce_mean(tf.tanh(tf.tensordot(apart, WEIGHTS, 1)))


def with_draws(made: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    logits = tf.matmul(made, made, transpose_b=True)
    return tf.reduce_mean(logits + tf.random.normal(tf.shape(logits), dtype=logits.dtype))


def with_a_custom_gradient_of_a_layer(made: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    """The argument is the result of a layer, which each replica would compute for all examples."""
    return tf.reduce_mean(closeness(made))


def with_a_custom_gradient_of_an_input(made: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    """The argument is the input itself, which has the rows of the replica."""
    return tf.reduce_mean(closeness(x) * tf.abs(tf.sin(made[:, :1])))


WEIGHTS = tf.Variable([0.3, -0.2], dtype=tf.float64, name="weights")


@pytest.mark.parametrize(
    "loss, others",
    [
        (with_a_layer, [WEIGHTS]),
        (with_draws, []),
        (with_a_custom_gradient_of_a_layer, []),
        (with_a_custom_gradient_of_an_input, []),
    ],
    ids=["layer", "draws", "custom gradient", "custom gradient of an input"],
)
def test_parts_that_not_all_replicas_can_compute_stay_as_they_are(
    loss: Loss, others: list[tf.Variable], caplog: pytest.LogCaptureFixture
) -> None:
    captured = capture(stepping(loss, *others), np.ones((4, 3)), is_split=True)
    assert not captured.step.in_step_all_reduces
    rewrite(captured.step, Context(plan(captured.step, 2), 0))
    assert any("treated as a mean" in message for message in caplog.messages)


def test_a_step_that_cannot_be_traced_with_the_rows_of_all_stays_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "autodist")
    traces = []

    def loss(made: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
        traces.append(1)
        if len(traces) > 1:
            raise ValueError("no such shape")
        return supervised_contrastive(made, x)

    assert not capture(stepping(loss), np.ones((4, 3)), is_split=True).step.in_step_all_reduces
    assert any(
        "cannot be traced with those of all replicas: ValueError: no such shape" in message
        for message in caplog.messages
    )


@pytest.mark.parametrize("pace", [{"asynchronous": True}, {"staleness": 1}], ids=str)
def test_replicas_compare_their_own_examples_if_no_step_waits_for_another(pace: dict[str, object]) -> None:
    captured = capture(stepping(supervised_contrastive), np.ones((4, 3)), is_split=True)
    owners = {gradient.variable: 0 for gradient in captured.step.gradients}
    rewritten = rewrite(captured.step, Context(plan(captured.step, 2, owners=owners, **pace), 0))
    assert captured.step.in_step_all_reduces
    assert not any(one.kind is PendingReductionKind.WHOLE for one in rewritten.reductions)


def test_metrics_beside_the_loss_count_the_whole_batch_once() -> None:
    """As SimCLR measures how often the other view is the nearest."""
    right, seen = (tf.Variable(0.0, dtype=tf.float64, name=name, trainable=False) for name in ("right", "seen"))

    def loss(made: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
        logits = made @ tf.transpose(x[:, :2])
        labels = tf.range(tf.shape(made)[0])
        hits = tf.cast(tf.equal(tf.argmax(logits, 1, tf.int32), labels), made.dtype)
        right.assign_add(tf.reduce_sum(hits))
        seen.assign_add(tf.cast(tf.size(hits), made.dtype))
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))

    step, rng = stepping(loss), np.random.default_rng(0)
    data = [(rng.normal(size=(n, 3)),) for n in (8, 7)]
    captured = capture(step, *data[0], is_split=True)
    assert captured.step.in_step_all_reduces
    assert_same(train(captured, plan(captured.step, 2, 2), data), one_device(captured, step, data), 1e-10)


@pytest.mark.feature("fit", "loss: compares examples with one another")
def test_fit_equals_one_device_with_an_uneven_last_batch() -> None:
    ad = AutoDist(resource_spec=ResourceSpec.from_dict({"nodes": [{"address": "localhost", "cpus": [0, 1]}]}))
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(19, 3)), rng.integers(0, 3, 19).astype(np.float64)

    class Contrastive(keras.losses.Loss):
        def call(self, y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
            made, labels = tf.math.l2_normalize(y_pred, 1), tf.reshape(y_true, [-1, 1])
            alike = tf.cast(tf.equal(labels, tf.transpose(labels)), made.dtype)
            alike /= tf.reduce_sum(alike, 1, keepdims=True)
            return tf.nn.softmax_cross_entropy_with_logits(alike, made @ tf.transpose(made) / 0.5)

    def fitted() -> list[np.ndarray]:
        keras.utils.set_random_seed(1)
        layers = [keras.Input((3,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(2)]
        model = keras.Sequential(layers)
        model.compile(keras.optimizers.Adam(0.01), Contrastive())
        losses = model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0).history["loss"]
        return [*model.get_weights(), np.array(losses)]

    alone = fitted()
    with ad.scope():
        together = fitted()
    for one, other in zip(alone, together, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6)
