"""Losses that combine sums and means of the batch with single examples train as on one device, without changes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from autodist.errors import RewriteError
from autodist.graph.parts import PendingReductionKind
from autodist.kernels import Context, rewrite
from tests.unit.kernels.in_one_process import assert_same, capture, one_device, plan, rewritten, train
from tests.unit.kernels.pairs import pairs

Loss = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]
"""A function of the model's outputs for the examples, and of the examples themselves."""


def stepping(loss: Loss) -> Callable[[tf.Tensor], tf.Tensor]:
    rng = np.random.default_rng(1)
    first, last = (tf.Variable(rng.normal(size=shape), name=name) for shape, name in (((3, 4), "a"), ((4, 2), "b")))

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            value = loss(tf.tanh(x @ first) @ last, x)
        for variable, gradient in zip((first, last), tape.gradient(value, (first, last)), strict=True):
            variable.assign_sub(0.1 * gradient)
        return value

    return step


def normalised_advantages(made: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    """As proximal policy optimisation weighs its examples."""
    gains = x[:, 0]
    gains = (gains - tf.reduce_mean(gains)) / (tf.math.reduce_std(gains) + 1e-8)
    return -tf.reduce_mean(tf.nn.log_softmax(made)[:, 0] * gains)


def those_above_the_mean(made: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    each = tf.reduce_sum((made - 1.0) ** 2, 1)
    counts = tf.cast(each > tf.reduce_mean(each), made.dtype)
    return tf.reduce_sum(each * counts) / tf.maximum(tf.reduce_sum(counts), 1.0)


def far_from_the_mean_of_some(made: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    """The mean's weight is the number of unmasked examples; a replica may have none."""
    each, counts = tf.reduce_sum(made, 1), tf.cast(x[:, 1] > 3.0, made.dtype)
    mean = tf.math.divide_no_nan(tf.reduce_sum(each * counts), tf.reduce_sum(counts))
    return tf.reduce_mean(tf.abs(each - mean))


def beside_their_sum(made: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    each = tf.reduce_sum(tf.square(made), 1)
    return tf.reduce_mean(tf.math.log(0.01 * tf.reduce_sum(each) + each))


def beside_what_is_mapped_at_once(made: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    each = tf.vectorized_map(lambda row: tf.reduce_sum(tf.square(row)), made)
    return tf.reduce_mean(tf.abs(each - tf.reduce_mean(each)))


def covariances(made: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    """As VICReg keeps features apart: known as a mean, and yet of deviations from a mean of the replica's own."""
    apart = made - tf.reduce_mean(made, 0)
    spread = tf.sqrt(tf.math.reduce_variance(made, 0) + 1e-4)
    found = tf.matmul(apart, apart, transpose_a=True) / (tf.cast(tf.shape(x)[0], made.dtype) - 1.0)
    return tf.reduce_sum(found**2) + tf.reduce_mean(tf.nn.relu(1.0 - spread))


def correlations(made: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    """A feature comparison as in Barlow Twins: examples are combined with a root of a mean."""

    def standard(z: tf.Tensor) -> tf.Tensor:
        return (z - tf.reduce_mean(z, 0)) / tf.math.reduce_std(z, 0)

    count = tf.cast(tf.shape(x)[0], made.dtype)
    found = tf.matmul(standard(made), standard(made + x[:, :2]), transpose_a=True) / count
    return tf.reduce_sum((found - tf.eye(2, dtype=made.dtype)) ** 2)


def apart_from_the_means_of_classes(made: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    """Looks up rows of the means, so that their gradient has rows (IndexedSlices)."""
    classes = tf.cast(x[:, 0] > 3.0, tf.int32)
    means = tf.math.unsorted_segment_mean(made, classes, 2)
    return tf.reduce_mean((made - tf.gather(means, classes)) ** 2) + 0.1 * tf.reduce_mean(means**2)


def repeated(repeat: Callable[[tf.Tensor, tf.Tensor], tf.Tensor], name: str) -> Loss:
    """A root of a mean, repeated for each example, as a feature of its own (minibatch deviations of a GAN)."""

    def loss(made: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
        deviation = tf.reshape(tf.math.reduce_std(made[:, 0]), [1, 1])
        return tf.reduce_mean(tf.concat([made, repeat(deviation, tf.shape(made)[0])], 1) ** 4)

    loss.__name__ = name
    return loss


def behind_a_step_of_descent(made: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    """A meta-gradient through an update computed from the whole batch, twice."""
    taught = tf.constant([[0.5], [-0.3]], made.dtype)
    for _ in range(2):
        with tf.GradientTape() as tape:
            tape.watch(taught)
            read = tf.cond(tf.size(taught) > 1, lambda: made, lambda: -made)  # two tapes and a function
            value = tf.reduce_mean((read @ taught - x[:, :1]) ** 2)
        taught -= 0.1 * tape.gradient(value, taught)
    return tf.reduce_mean((made @ taught - x[:, 1:2]) ** 2)


def behind_a_step_of_descent_on_a_loss_of_keras(made: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    """The inner loss is a quotient of a sum and a count, whose parts have weights of their own at the top level."""
    squared, taught = keras.losses.MeanSquaredError(dtype="float64"), tf.constant([[0.5], [-0.3]], made.dtype)
    for _ in range(2):
        with tf.GradientTape() as tape:
            tape.watch(taught)
            value = squared(x[:, :1], made @ taught)
        taught -= 0.1 * tape.gradient(value, taught)
    return squared(x[:, 1:2], made @ taught)


def behind_gradients_scaled_by_a_root(made: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    """Only the backward pass uses the statistic."""
    size = tf.sqrt(tf.reduce_mean(tf.square(x)))

    @tf.custom_gradient
    def reversed_gradient(z: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        return tf.identity(z), lambda upstream: -size * upstream

    return tf.reduce_mean(tf.square(reversed_gradient(made) - 1.0))


def behind_gradients_of_centred_examples(made: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    rows = x[:, :1] - tf.reduce_mean(x[:, :1])
    scaled = tf.custom_gradient(lambda z: (tf.identity(z), lambda upstream: rows * upstream))
    return tf.reduce_mean(tf.square(scaled(made) - 1.0))


LOSSES = [
    normalised_advantages,
    those_above_the_mean,
    far_from_the_mean_of_some,
    beside_their_sum,
    beside_what_is_mapped_at_once,
    apart_from_the_means_of_classes,
    repeated(lambda one, rows: tf.tile(one, [rows, 1]), "tiled"),
    repeated(lambda one, rows: tf.broadcast_to(one, [rows, 1]), "broadcast"),
    repeated(lambda one, rows: tf.fill([rows, 1], one[0, 0]), "filled"),
    repeated(lambda one, rows: tf.repeat(one, rows, 0), "as_often_as_rows"),
    behind_a_step_of_descent,
    behind_a_step_of_descent_on_a_loss_of_keras,
    behind_gradients_scaled_by_a_root,
    behind_gradients_of_centred_examples,
]


@pytest.mark.feature("function", "loss: examples beside sums and means of the batch")
@pytest.mark.parametrize(
    "loss, shape",
    [*pairs(LOSSES, [(1, 3), (2, 2)]), (covariances, (1, 3)), (correlations, (2, 2))],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_they_are_those_of_the_whole_batch(
    loss: Loss, shape: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "autodist")
    step = stepping(loss)
    rng = np.random.default_rng(0)
    data = [(rng.normal(3.0, 2.0, size=(n, 3)),) for n in (8, 7, 3)]
    captured = capture(step, *data[0], is_split=True)
    assert captured.step.in_step_all_reduces
    assert_same(train(captured, plan(captured.step, *shape), data), one_device(captured, step, data), 1e-10)
    logged = [message for message in caplog.messages if "sums or means of the batch with single examples" in message]
    assert len(logged) == 1 and not any("treated as a mean" in message for message in caplog.messages)


def given(back: Callable[[tf.Tensor], tf.Tensor]) -> Callable[[tf.Tensor], tf.Tensor]:
    """Returns the identity with a gradient of one's own."""
    made: Callable[[tf.Tensor], tf.Tensor] = tf.custom_gradient(lambda z: (tf.identity(z), back))
    return made


@tf.custom_gradient
def masked_mean(each: tf.Tensor, mask: tf.Tensor) -> tuple[tf.Tensor, Callable[..., Any]]:
    """Its gradient divides by a sum of the batch as its value does."""
    count = tf.reduce_sum(mask)
    return tf.reduce_sum(each * mask) / count, lambda upstream: (upstream * mask / count, None)


def squares(made: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(tf.square(made - 1.0), 1)


def pairs_of(count: tf.Tensor) -> tf.Tensor:
    return count * (count - 1) // 2


CUSTOM: dict[str, Loss] = {
    "rows by the largest value": lambda made, x: tf.reduce_mean(
        squares(given(lambda upstream: upstream / tf.reduce_max(tf.abs(x)))(made))
    ),
    "rows by the largest value and a mean": lambda made, x: tf.reduce_mean(
        squares(given(lambda upstream: upstream * tf.reduce_max(x) * tf.reduce_mean(made))(made))
    ),
    "rows without their mean": lambda made, x: tf.reduce_mean(
        squares(given(lambda upstream: upstream - tf.reduce_mean(upstream, 0))(made))
    ),
    "rows by the number of pairs": lambda made, x: tf.reduce_mean(
        squares(given(lambda upstream: upstream / tf.cast(pairs_of(tf.shape(x)[0]), x.dtype))(made))
    ),
    "the loss by a mean": lambda made, x: given(lambda upstream: upstream * tf.reduce_mean(x))(
        tf.reduce_mean(squares(made))
    ),
    "the loss by the largest value": lambda made, x: given(lambda upstream: upstream * tf.reduce_max(x))(
        tf.reduce_mean(squares(made))
    ),
    "a masked mean": lambda made, x: masked_mean(squares(made), tf.cast(x[:, 0] > 2.0, x.dtype)),
}


@pytest.mark.feature("function", "loss: custom gradients that use the batch")
@pytest.mark.parametrize("name, shape", pairs(CUSTOM, [(1, 3), (2, 2)]))
def test_custom_gradients_use_the_whole_batch(
    name: str, shape: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    """The last batch leaves a replica without examples, which gets no cotangents either."""
    check(stepping(CUSTOM[name]), shape, caplog)


def by_python(upstream: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    return upstream / tf.numpy_function(np.max, [x], tf.float64)


def test_values_of_python_code_in_a_custom_gradient_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    step = stepping(lambda made, x: tf.reduce_mean(squares(given(lambda upstream: by_python(upstream, x))(made))))
    with caplog.at_level(logging.WARNING, "autodist"):
        capture(step, np.ones((4, 3)), is_split=True)
    (message,) = caplog.messages
    assert "a tf.custom_gradient combines gradients" in message and "test_global_statistics.py" in message


def test_nothing_is_exchanged_or_told_for_layers_that_are_computed_again(caplog: pytest.LogCaptureFixture) -> None:
    """TensorFlow's gradient of them looks at an element of the cotangents, to order the two passes."""
    weight = tf.Variable(np.eye(3), name="weight")
    layer = tf.recompute_grad(lambda x: tf.tanh(x @ weight) + tf.reduce_mean(x, 1, keepdims=True))

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(layer(layer(x)) ** 2)
        weight.assign_sub(0.1 * tape.gradient(loss, weight))
        return loss

    captured = capture(step, np.ones((4, 3)), is_split=True)
    assert not captured.step.in_step_all_reduces
    with caplog.at_level(logging.WARNING, "autodist"):
        rewritten(captured, plan(captured.step, 2))
    assert not caplog.messages


def column(x: tf.Tensor) -> tf.Tensor:
    """The index of one of two columns for each example."""
    return tf.cast(x[:, 0] > 3.0, tf.int64)


PICKED: dict[str, Loss] = {
    "by gather": lambda made, x: tf.gather(made, column(x), batch_dims=1),
    "by gather, of three axes": lambda made, x: tf.gather(made[:, None], column(x)[:, None], axis=2, batch_dims=1),
    "by gather_nd": lambda made, x: tf.gather_nd(made, column(x)[:, None], batch_dims=1),
    "by gather_nd with row numbers": lambda made, x: tf.gather_nd(
        made, tf.stack([tf.range(tf.shape(x)[0]), tf.cast(column(x), tf.int32)], 1)
    ),
    "the largest": lambda made, x: tf.math.top_k(made, 1).values,
    "in their order": lambda made, x: tf.sort(made)[:, 0],
    "by repetition": lambda made, x: tf.repeat(made, 2, axis=1)[:, 1],
}


@pytest.mark.feature("function", "loss: an element of each example, as the Q-value of an action")
@pytest.mark.parametrize("name", PICKED)
def test_lengths_in_gradients_are_those_of_each_replica(name: str, caplog: pytest.LogCaptureFixture) -> None:
    check(stepping(lambda made, x: tf.reduce_mean(tf.square(PICKED[name](made, x) - 1.0))), (2, 2), caplog)


@pytest.mark.parametrize("of", [tf.reduce_mean, tf.reduce_max], ids=["mean", "max"])
def test_custom_gradients_of_weights_use_the_whole_batch(
    of: Callable[[tf.Tensor], tf.Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    weight = tf.Variable(np.random.default_rng(1).normal(size=(3, 2)), name="weight")

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(squares(x @ given(lambda upstream: upstream * of(x))(weight)))
        weight.assign_sub(0.1 * tape.gradient(loss, weight))
        return loss

    check(step, (2, 2), caplog)


def check(step: Callable[[tf.Tensor], tf.Tensor], shape: tuple[int, int], caplog: pytest.LogCaptureFixture) -> None:
    rng = np.random.default_rng(0)
    data = [(rng.normal(3.0, 2.0, size=(n, 3)),) for n in (8, 7, 3)]
    with caplog.at_level(logging.WARNING, "autodist"):
        captured = capture(step, *data[0], is_split=True)
        trained = train(captured, plan(captured.step, *shape), data)
    assert_same(trained, one_device(captured, step, data), 1e-10)
    assert not caplog.records


def test_a_gradient_that_is_itself_a_mean_over_the_examples_is_refused() -> None:
    weight = tf.Variable([[0.5], [0.2], [-0.3]], dtype=tf.float64, name="weight")

    @tf.custom_gradient
    def product(x: tf.Tensor) -> tuple[tf.Tensor, Callable[..., Any]]:
        def backward(upstream: tf.Tensor, variables: list[tf.Variable]) -> tuple[tf.Tensor, list[tf.Tensor]]:
            return upstream @ tf.transpose(weight), [tf.reduce_mean(x * upstream, 0)[:, None] for _ in variables]

        return x @ weight, backward

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(product(x) - 1.0))
        weight.assign_sub(tape.gradient(loss, weight))
        return loss

    batch = (np.random.default_rng(0).normal(size=(4, 3)),)
    captured = capture(step, *batch, is_split=True)
    with pytest.raises(RewriteError, match=r"the gradient of weight, .* is a mean over the examples"):
        train(captured, plan(captured.step, 1, 2), [batch])


def test_weights_of_losses_that_lengths_of_gradients_teach() -> None:
    """As GradNorm has it: they are compared with one another and with powers of the losses' ratios."""
    rng = np.random.default_rng(1)
    head, scales = (
        tf.Variable(rng.normal(size=(3, 2)), name="head"),
        tf.Variable([1.0, 2.0], dtype=tf.float64, name="s"),
    )

    def step(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape(persistent=True) as tape:
            losses = [tf.reduce_mean((tf.tanh(x @ head)[:, k] - x[:, k]) ** 2) for k in range(2)]
            weighed = [scales[k] * loss for k, loss in enumerate(losses)]
            lengths = [tf.norm(tape.gradient(loss, head)) for loss in weighed]
            rates = (tf.stack(losses) / tf.reduce_mean(tf.stack(losses))) ** 1.5
            wanted = tf.stop_gradient(rates * (lengths[0] + lengths[1]) / 2.0)
            total, apart = weighed[0] + weighed[1], tf.reduce_sum(tf.abs(tf.stack(lengths) - wanted))
        by_head, by_scales = tape.gradient(total, head), tape.gradient(apart, scales)
        head.assign_sub(0.1 * by_head)
        scales.assign_sub(0.1 * by_scales)
        return total, apart

    data = [(rng.normal(size=(n, 3)),) for n in (8, 7, 3)]
    captured = capture(step, *data[0], is_split=True)
    assert_same(train(captured, plan(captured.step, 2, 2), data), one_device(captured, step, data), 1e-10)


def keeping(written: Callable[[tf.Tensor, tf.Variable], tf.Tensor]) -> Callable[[tf.Tensor], tf.Tensor]:
    """Returns a step whose loss reads a value that the step has written before."""
    kept = tf.Variable(tf.ones(2, tf.float64), name="kept", trainable=False)
    weights = tf.Variable(np.random.default_rng(1).normal(size=(3, 2)), name="weights")

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            made = tf.tanh(x @ weights)
            kept.assign(written(made, kept))
            value = tf.reduce_mean(tf.reduce_sum((made - kept) ** 2, 1))
        weights.assign_sub(0.1 * tape.gradient(value, weights))
        return value

    return step


WRITTEN = {
    "an average": lambda made, kept: 0.9 * kept + 0.1 * tf.reduce_mean(made, 0),
    "a spread": lambda made, kept: 0.9 * kept + 0.1 * tf.math.reduce_std(made, 0),
    "a sum": lambda made, kept: kept + tf.reduce_sum(made, 0),
}


@pytest.mark.feature("function", "step: reads what it has written of means and sums of the batch")
@pytest.mark.parametrize("written, shape", pairs(WRITTEN, [(1, 3), (2, 2)]))
def test_a_value_that_a_step_writes_and_reads_again_is_of_the_whole_batch(
    written: str, shape: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    step = keeping(WRITTEN[written])
    rng = np.random.default_rng(0)
    data = [(rng.normal(size=(n, 3)),) for n in (8, 7, 5)]
    captured = capture(step, *data[0], is_split=True)
    assert_same(train(captured, plan(captured.step, *shape), data), one_device(captured, step, data), 1e-10)
    assert "read again" not in caplog.text


def test_replicas_that_read_again_what_is_their_own_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    step = keeping(lambda made, kept: tf.gather(made, 0))
    captured = capture(step, np.ones((4, 3)), is_split=True)
    rewrite(captured.step, Context(plan(captured.step, 2), 0))
    assert "kept is written before the gradients are computed" in caplog.text


def compared(made: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    """By drawn weights, of which each replica has its own."""
    logits = made @ tf.transpose(made) * tf.random.uniform((), dtype=made.dtype)
    return tf.reduce_mean(tf.nn.log_softmax(logits)[:, 0] - tf.reduce_mean(x))


def root(made: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    return tf.sqrt(tf.reduce_mean(tf.square(made)))


@pytest.mark.parametrize("loss", [compared, root, lambda made, x: tf.reduce_sum(made)])
def test_known_values_and_those_that_stay_unknown_do_not_change(loss: Loss) -> None:
    step = stepping(loss)
    assert capture(step, np.ones((4, 3)), is_split=True).step == capture(step, np.ones((4, 3))).step


def test_plain_batch_normalisation_sees_its_replicas_examples_as_before() -> None:
    layer = keras.layers.BatchNormalization(dtype="float64")
    layer.build((None, 2))

    def loss(made: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
        return normalised_advantages(layer(made, training=True), tf.reduce_sum(layer(made, training=True), 1)[:, None])

    step = capture(stepping(loss), np.ones((4, 3)), is_split=True).step
    of_layers = {name for name in step.graph_index.nodes if "batch_normalization" in name and "whole" in name}
    assert step.in_step_all_reduces and not of_layers


def test_a_trace_that_names_other_nodes_is_not_taken() -> None:
    traces = []

    def loss(made: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
        traces.append(1)
        with tf.name_scope(f"trace_{len(traces)}"):
            return normalised_advantages(made, x)

    step = capture(stepping(loss), np.ones((4, 3)), is_split=True).step
    assert not step.in_step_all_reduces and any(name.startswith("trace_1/") for name in step.graph_index.nodes)


@pytest.mark.parametrize("pace", [{"asynchronous": True}, {"staleness": 1}], ids=str)
def test_replicas_use_their_own_statistics_if_no_step_waits_for_another(pace: dict[str, object]) -> None:
    step = stepping(normalised_advantages)
    data = [(np.random.default_rng(0).normal(size=(8, 3)),)]
    captured = capture(step, *data[0], is_split=True)
    owners = {g.variable: 0 for g in captured.step.gradients}
    item = rewrite(captured.step, Context(plan(captured.step, 2, owners=owners, **pace), 0))
    assert not any(j.kind is PendingReductionKind.WHOLE for j in item.reductions)
