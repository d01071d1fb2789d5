"""State written outside of the update, without a declared aggregation: it equals one device's."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import keras
import numpy as np
import pytest
import tensorflow as tf

from autodist.capture.function import CapturedFunction
from tests.unit.kernels.in_one_process import Trained, assert_same, capture, one_device, plan, rewritten, train
from tests.unit.kernels.pairs import pairs

pytestmark = pytest.mark.usefixtures("keras_in_float64")

SHAPES = [(1, 2), (2, 1), (2, 2)]

F64, I64 = tf.float64, tf.int64
Write = Callable[..., object]


def state(value: object, dtype: tf.DType = F64, name: str = "state") -> tf.Variable:
    return tf.Variable(value, dtype=dtype, name=name, trainable=False)


def step_that(write: Write) -> Callable[[tf.Tensor], tf.Tensor]:
    """A step of training which also makes `write(x, errors, loss)`, with x of shape [n, 3] and errors of shape [n]."""
    weight = tf.Variable(np.random.default_rng(1).normal(size=(3, 1)), name="weight")

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            errors = tf.square(x @ weight)[:, 0]
            loss = tf.reduce_mean(errors)
        weight.assign_sub(0.1 * tape.gradient(loss, weight))
        write(x, errors, loss)
        return loss

    return step


@lru_cache(maxsize=1)  # for all shapes
def on_one_device(make: Callable[[], Write]) -> tuple[CapturedFunction, list[tuple[np.ndarray]], Trained]:
    step, rng = step_that(make()), np.random.default_rng(0)
    data = [(rng.normal(size=(n, 3)),) for n in (7, 4, 5)]
    captured = capture(step, *data[0])
    return captured, data, one_device(captured, step, data)


def trained(make: Callable[[], Write], shape: tuple[int, int]) -> tuple[Trained, Trained]:
    """Returns the results of three steps with uneven batches: of replicas, and of one device."""
    captured, data, alone = on_one_device(make)
    return train(captured, plan(captured.step, *shape), data), alone


def examples(x: tf.Tensor, dtype: tf.DType = I64) -> tf.Tensor:
    return tf.cast(tf.shape(x)[0], dtype)


def examples_seen_in_three_goes() -> Write:
    seen = state(0, I64)
    return lambda x, errors, loss: [seen.assign_add(examples(x)) for _ in range(3)]


def examples_left() -> Write:
    left = state(100, I64)
    return lambda x, errors, loss: left.assign_sub(examples(x))


def large_errors() -> Write:
    count = state(0, I64)
    return lambda x, errors, loss: count.assign_add(tf.reduce_sum(tf.cast(errors > 1, I64)))


def large_losses() -> Write:
    count = state(0, I64)
    return lambda x, errors, loss: count.assign_add(tf.cast(loss > 1, I64))


def sum_by_column() -> Write:
    total = state(np.zeros(3))
    return lambda x, errors, loss: total.assign_add(tf.reduce_sum(x, 0))


def least_loss() -> Write:
    least = state(100.0)
    return lambda x, errors, loss: least.assign(tf.minimum(least, loss))


def squared_losses() -> Write:
    total = state(0.0)
    return lambda x, errors, loss: total.assign_add(loss * loss)


def masked_mean() -> Write:
    last = state(0.0)

    def write(x: tf.Tensor, errors: tf.Tensor, loss: tf.Tensor) -> None:
        mask = tf.cast(errors > 0.5, F64)
        last.assign(tf.reduce_sum(errors * mask) / tf.reduce_sum(mask))

    return write


def moving_average_by_subtraction() -> Write:
    average = state(1.0)
    return lambda x, errors, loss: average.assign_sub(0.1 * (average - loss))


def moving_counts() -> Write:
    counts = state(np.zeros(3))

    def write(x: tf.Tensor, errors: tf.Tensor, loss: tf.Tensor) -> None:
        hits = tf.one_hot(tf.argmax(x, 1), 3, dtype=F64)
        counts.assign(0.9 * counts + 0.1 * tf.reduce_sum(hits, 0))

    return write


def added_and_scaled() -> Write:
    total = state(0.0)

    def write(x: tf.Tensor, errors: tf.Tensor, loss: tf.Tensor) -> None:
        total.assign_add(tf.reduce_sum(errors))
        total.assign(total * 0.5)

    return write


def reset_and_added() -> Write:
    total = state(5.0)

    def write(x: tf.Tensor, errors: tf.Tensor, loss: tf.Tensor) -> None:
        total.assign(0.0)
        total.assign_add(tf.reduce_sum(errors))

    return write


def one_from_another() -> Write:
    total, half, weighed = state(0.0), state(0.0, name="half"), state(0.0, name="weighed")

    def write(x: tf.Tensor, errors: tf.Tensor, loss: tf.Tensor) -> None:
        total.assign_add(tf.reduce_sum(errors))
        half.assign(total * 0.5)
        weighed.assign(total * loss)

    return write


def metric_of_several_losses() -> Write:
    mean = keras.metrics.Mean()
    return lambda x, errors, loss: [mean.update_state(loss * k) for k in (1.0, 2.0, 3.0)]


def metric_that_is_reset() -> Write:
    mean = keras.metrics.Mean()
    return lambda x, errors, loss: (mean.reset_state(), mean.update_state(errors))


def largest() -> Write:
    most = state(0.0)
    return lambda x, errors, loss: most.assign(tf.maximum(most, tf.reduce_max(errors)))


def largest_of_inputs() -> Write:
    most = state(0.0)
    return lambda x, errors, loss: most.assign_add(tf.reduce_max(x))


def whole_number_of_the_largest() -> Write:
    most = state(0, I64)
    return lambda x, errors, loss: most.assign(tf.cast(tf.reduce_max(errors), I64))


CASES = [
    examples_seen_in_three_goes, examples_left, large_errors, large_losses, sum_by_column, least_loss,
    squared_losses, masked_mean, moving_average_by_subtraction, moving_counts, added_and_scaled, reset_and_added,
    one_from_another, metric_of_several_losses, metric_that_is_reset,
    largest, largest_of_inputs, whole_number_of_the_largest,
]  # fmt: skip


@pytest.mark.parametrize("make, shape", pairs(CASES, SHAPES))
def test_it_is_that_of_one_device(
    make: Callable[[], Write], shape: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    found, expected = trained(make, shape)
    assert_same(found, expected)
    assert not caplog.records


def last_rows() -> Write:
    queue = state(np.zeros((8, 3)))
    return lambda x, errors, loss: queue.assign(tf.concat([x, queue], 0)[:8])


def likenesses() -> Write:
    last = state(0.0)
    return lambda x, errors, loss: last.assign(likeness(x))


def noise() -> Write:
    drawn = state(0.0)
    return lambda x, errors, loss: drawn.assign(loss + tf.random.normal([], dtype=F64, seed=1))


@pytest.mark.parametrize("make, shape", pairs([last_rows, likenesses, noise], SHAPES))
def test_state_of_unknown_dependence_is_logged_and_equal_on_all_workers(
    make: Callable[[], Write], shape: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    found, _ = trained(make, shape)
    found.variable(next(name for name in found.variables[0] if name != "weight"))  # fails if workers differ
    said = [r.getMessage() for r in caplog.records]
    assert len(said) == shape[0]
    assert all("not known how the value that the step writes depends on the batch" in text for text in said)


def declared_norm() -> Write:
    declared = tf.VariableAggregation.SUM
    norm = tf.Variable(0.0, dtype=F64, name="state", trainable=False, aggregation=declared)
    return lambda x, errors, loss: norm.assign(tf.sqrt(tf.reduce_sum(tf.matmul(x, x, transpose_b=True))))


def test_a_metric_that_is_not_a_sum_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    trained(declared_norm, SHAPES[-1])
    assert "state becomes the sum of the replicas' changes" in caplog.text


def likeness(x: tf.Tensor) -> tf.Tensor:
    """A scalar that compares examples with each other: a part's value does not determine the whole batch's."""
    return tf.reduce_mean(tf.nn.relu(1 - tf.matmul(x, x, transpose_b=True)))


def averaged_likeness(x: np.ndarray, replicas: int) -> float:
    """Returns the replicas' results, averaged by their examples."""
    parts = np.array_split(x, replicas)
    return float(sum(len(p) * np.maximum(1 - p @ p.T, 0).mean() for p in parts) / len(x))


def mean_of_it() -> Write:
    mean = keras.metrics.Mean()
    return lambda x, errors, loss: mean.update_state(likeness(x))


def mean_of_it_by_examples() -> Write:
    mean = keras.metrics.Mean()
    return lambda x, errors, loss: mean.update_state(likeness(x), sample_weight=tf.shape(x)[0])


def mean_of_it_divided_as_keras_does() -> Write:
    mean = keras.metrics.Mean()

    def write(x: tf.Tensor, errors: tf.Tensor, loss: tf.Tensor) -> None:
        rows = tf.reduce_mean(tf.nn.relu(1 - tf.matmul(x, x, transpose_b=True)), 1)
        mean.update_state(tf.reduce_sum(rows) / keras.ops.cast(keras.ops.prod(keras.ops.shape(rows)), "float64"))

    return write


def mean_of_it_that_is_reset() -> Write:
    mean = keras.metrics.Mean()
    return lambda x, errors, loss: (mean.reset_state(), mean.update_state(likeness(x)))


def mean_of_its_rows() -> Write:
    mean = keras.metrics.Mean()
    return lambda x, errors, loss: mean.update_state(
        tf.reduce_mean(tf.nn.relu(1 - tf.matmul(x, x, transpose_b=True)), 1)
    )


def mean_of_it_and_of_the_loss() -> Write:
    mean = keras.metrics.Mean()
    return lambda x, errors, loss: (mean.update_state(likeness(x)), mean.update_state(likeness(x) * 1.0))


IS_TOLD = {
    mean_of_it: True, mean_of_it_by_examples: False, mean_of_it_divided_as_keras_does: True,
    mean_of_it_that_is_reset: True, mean_of_its_rows: False, mean_of_it_and_of_the_loss: True,
}  # fmt: skip


@pytest.mark.parametrize("make, shape", pairs(IS_TOLD, SHAPES))
def test_a_mean_of_what_is_not_known_is_averaged_with_its_count(
    make: Callable[[], Write],
    shape: tuple[int, int],
    caplog: pytest.LogCaptureFixture,
) -> None:
    rng = np.random.default_rng(0)
    data = [(rng.normal(size=(8, 3)),) for _ in range(2)]
    step = step_that(make())
    captured = capture(step, *data[0])
    found = train(captured, plan(captured.step, *shape), data)
    expected = [averaged_likeness(x, shape[0] * shape[1]) for (x,) in data]
    logged = found.variable("mean/total") / found.variable("mean/count")
    assert logged == pytest.approx(expected[-1] if "reset" in make.__name__ else np.mean(expected), rel=1e-12)
    said = [r.getMessage() for r in caplog.records]
    assert len(said) == (shape[0] if IS_TOLD[make] else 0)
    assert all("it is averaged over the replicas" in text for text in said)


def test_the_mean_of_a_loss_that_compares_examples_is_the_mean_of_the_losses(caplog: pytest.LogCaptureFixture) -> None:
    """Its weights, a softmax along the batch, add up to 1 in each part."""
    weight, mean = tf.Variable(np.ones(3), name="weight"), keras.metrics.Mean()

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.nn.softmax(tf.linalg.matvec(x, weight)) * x[:, 0])
        weight.assign_sub(0.1 * tape.gradient(loss, weight))
        mean.update_state(loss)
        return loss

    data = [(np.random.default_rng(k).normal(size=(12, 3)),) for k in range(3)]
    captured = capture(step, *data[0])
    found = train(captured, plan(captured.step, *SHAPES[-1]), data)
    logged = found.variable("mean/total") / found.variable("mean/count")
    assert logged == pytest.approx(np.mean([outputs[0][0] for outputs in found.outputs]), rel=1e-12)
    assert "mean/total: it is not known" in caplog.text


def root_of_a_sum_of_pairs(x: tf.Tensor) -> tf.Tensor:
    return tf.sqrt(tf.reduce_sum(tf.matmul(x, x, transpose_b=True) ** 2))


def sum_of_pairs(x: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(tf.nn.relu(1 - tf.matmul(x, x, transpose_b=True)))


@pytest.mark.parametrize("loss_of, is_trained", [(root_of_a_sum_of_pairs, False), (sum_of_pairs, True)])
def test_a_metric_that_adds_up_what_may_be_a_mean_is_named(
    loss_of: Callable[[tf.Tensor], tf.Tensor], is_trained: bool, caplog: pytest.LogCaptureFixture
) -> None:
    weight, mean = tf.Variable(np.ones(3), name="weight"), keras.metrics.Mean()

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            value = loss_of(x * weight)
            loss = value if is_trained else tf.reduce_mean(x * weight)
        weight.assign_sub(0.1 * tape.gradient(loss, weight))
        mean.update_state(value)
        return loss

    captured = capture(step, np.ones((8, 3)))
    rewritten(captured, plan(captured.step, 1, 2))
    assert "mean/total: it is not known how the value that the step adds depends on the batch" in caplog.text
    assert "it is summed over the replicas" in caplog.text and "mean/count" not in caplog.text


@pytest.mark.parametrize("shape", [(1, 3), (2, 2)])
def test_means_of_the_nearest_examples_are_kept_without_any_gradient(shape):
    """As k-means does in batches; its variables are not trainable, since nothing is differentiated."""
    rng = np.random.default_rng(0)
    centres = tf.Variable(rng.normal(size=(3, 2)), trainable=False, name="centres")
    seen = tf.Variable(np.zeros(3), trainable=False, name="seen")

    def step(x):
        apart = tf.reduce_sum((x[:, None] - centres) ** 2, -1)
        nearest = tf.argmin(apart, 1)
        count = tf.math.unsorted_segment_sum(tf.ones_like(x[:, 0]), nearest, 3)
        total = tf.math.unsorted_segment_sum(x, nearest, 3)
        seen.assign_add(count)
        centres.assign_add((total - count[:, None] * centres) / tf.maximum(seen, 1.0)[:, None])
        return tf.reduce_mean(tf.reduce_min(apart, 1))

    data = [(rng.normal(size=(count, 2)),) for count in (8, 7, 3)]
    captured = capture(step, *data[0], is_whole=True)
    assert_same(train(captured, plan(captured.step, *shape), data), one_device(captured, step, data), 1e-12)
