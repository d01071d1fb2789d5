"""Evaluations: the outputs of a step without gradients are the whole batch's on every worker, or it is rejected."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from autodist.errors import RewriteError
from tests.unit.kernels.in_one_process import assert_same, capture, one_device, plan, train

CLUSTERS = [(1, 2, 0), (2, 1, 0), (3, 1, 0), (2, 2, 1)]
ROWS = (7, 8, 1, 3)


def batches(*shapes: tuple[int, ...], seed: int = 0) -> list[list[np.ndarray]]:
    draw = np.random.default_rng(seed)
    return [[draw.normal(size=(count, *shape)) for shape in shapes] for count in ROWS]


def assert_like_one_device(step, given, cluster=(2, 2, 1), owners=None):
    captured = capture(step, *given[0], is_global=True, is_whole=True)
    workers, replicas, servers = cluster
    strategy = plan(captured.step, workers, replicas, owners, servers=servers)
    assert_same(train(captured, strategy, given), one_device(captured, step, given), rtol=1e-13)


@pytest.fixture
def float64():
    before = keras.config.floatx()
    keras.config.set_floatx("float64")
    yield
    keras.config.set_floatx(before)


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_rows_means_and_what_is_made_of_them_are_those_of_the_whole_batch(cluster):
    weight = tf.Variable(np.random.default_rng(1).normal(size=(4, 3)), name="weight")

    def step(x):
        y = x @ weight
        loss = tf.reduce_mean(tf.square(y), 0)
        return y, tf.transpose(y), loss, tf.sqrt(tf.reduce_mean(loss)), tf.argmax(y, 1), tf.reduce_max(y, 0), weight + 1

    assert_like_one_device(step, batches((4,)), cluster)


@pytest.mark.parametrize("cluster", [(3, 1, 0), (2, 2, 1)])
def test_metrics_keep_what_one_device_keeps(cluster, float64):
    metrics = [
        keras.metrics.Mean(dtype="float64"),
        keras.metrics.MeanSquaredError(dtype="float64"),
        keras.metrics.AUC(num_thresholds=20, dtype="float64"),
        keras.metrics.Precision(dtype="float64"),
        keras.metrics.R2Score(dtype="float64"),
        keras.metrics.F1Score(dtype="float64"),
        keras.metrics.OneHotMeanIoU(3, dtype="float64"),
    ]

    def step(x, w):
        truth = tf.cast(x > 0.3, tf.float64)
        said = tf.sigmoid(x + 0.1)
        weight = tf.abs(w)
        metrics[0].update_state(tf.reduce_mean(x), sample_weight=tf.shape(x)[0])
        for metric in metrics[1:]:
            metric.update_state(truth, said, sample_weight=weight)
        return [metric.result() for metric in metrics]

    assert_like_one_device(step, batches((3,), ()), cluster)


@pytest.mark.parametrize(
    ("of", "why"),
    [
        (lambda x: x @ tf.transpose(x), "each example with every other"),
        (lambda x: tf.nn.softmax(x, 0), "see one another|not known"),
        (lambda x: x[::-1], "not known"),
        (lambda x: tf.scatter_nd(tf.range(tf.shape(x)[0])[:, None], x, [100, 4]), "the dense shape is not known"),
        (lambda x: tf.reduce_mean(tf.nn.softmax(x @ tf.transpose(x))), "see one another|not known"),
        (lambda x: tf.boolean_mask(x, x[:, 0] > x[-1, 0]), "not known|see one another"),
    ],
)
def test_a_step_that_would_need_a_guess_is_refused(of, why):
    given = batches((4,))
    captured = capture(of, *given[0], is_global=True, is_whole=True)
    with pytest.raises(RewriteError, match=why):
        train(captured, plan(captured.step, 2), given)


def test_a_metric_that_would_be_guessed_is_refused():
    last = tf.Variable(0.0, dtype=tf.float64, name="last", trainable=False)

    def step(x):
        last.assign(x[-1, 0])
        return last.read_value()

    captured = capture(step, *batches((4,))[0], is_global=True, is_whole=True)
    with pytest.raises(RewriteError, match="last"):
        train(captured, plan(captured.step, 2), batches((4,)))
