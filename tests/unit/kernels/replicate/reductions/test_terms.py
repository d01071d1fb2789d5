"""Losses without a common loss scale per replica: each term has its own scale, and ratios are those of the batch."""

from __future__ import annotations

import logging
from functools import lru_cache

import numpy as np
import pytest
import tensorflow as tf

from autodist.errors import StrategyError
from tests.unit.kernels.in_one_process import assert_same, capture, one_device, plan, rewritten, train
from tests.unit.kernels.pairs import pairs

SHAPES = [(1, 2), (2, 1)]
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s[0]}x{s[1]}")

CHOSEN = [[1, 1, 0, 0, 1, 0], [0, 0, 1, 0, 1], [0, 0, 0, 1], [0, 0, 0, 0], [1]]
"""By batch, which examples a mask lets pass: of one part none, of a whole batch none, of one example."""


def batches():
    rng = np.random.default_rng(0)
    found = []
    for chosen in CHOSEN:
        x = rng.normal(size=(len(chosen), 4))
        x[:, 0] = np.where(chosen, 1, -1) * (0.5 + np.abs(x[:, 0]))
        found.append((x,))
    return found


def mask(x):
    return tf.cast(x[:, :1] > 0, x.dtype)


def rows(x, first, second):
    return tf.square(tf.tanh(x @ first) @ second)


def data(x, first, second):
    return tf.reduce_sum(rows(x, first, second))


def average(x, first, second):
    return tf.reduce_mean(rows(x, first, second))


def masked(x, first, second):
    return tf.reduce_sum(mask(x) * rows(x, first, second))


def trust(x, first):
    return tf.sigmoid(tf.reduce_sum(x @ first, 1, keepdims=True))


def twice(mean, total):
    return mean * (mean + total) + mean


def step_of(loss):
    """Trains by a loss of a batch and two matrices."""
    rng = np.random.default_rng(1)
    first = tf.Variable(rng.normal(size=(4, 2)), name="first")
    second = tf.Variable(rng.normal(size=(2, 1)), name="second")

    def step(x):
        with tf.GradientTape() as tape:
            value = loss(x, first, second)
        for v, g in zip([first, second], tape.gradient(value, [first, second]), strict=True):
            v.assign_sub(0.05 * g)
        return value

    return step


@lru_cache(maxsize=1)  # for all shapes
def on_one_device(make, *given):
    step = make(*given)
    captured = capture(step, batches()[0][0])
    return captured, one_device(captured, step, batches())


def check(shape, make, *given):
    captured, alone = on_one_device(make, *given)
    strategy = plan(captured.step, *shape, owners={"first": 1} if shape[0] > 1 else None)
    assert_same(train(captured, strategy, batches()), alone)


SCALED = {
    "times, over and minus": lambda x, a, b: tf.negative(-3.0 * (data(x, a, b) - 0.1 * tf.nn.l2_loss(a)) / 2.0),
    "stacked": lambda x, a, b: tf.reduce_sum(tf.stack([data(x, a, b), 0.3 * tf.nn.l2_loss(a), tf.reduce_sum(b**2)])),
    "listed": lambda x, a, b: data(x, a, b) / 6 + tf.add_n([0.3 * tf.nn.l2_loss(a), tf.reduce_sum(tf.abs(b))]) + 1.0,
    "mean and sum": lambda x, a, b: average(x, a, b) + 0.01 * tf.reduce_sum(tf.square(x @ a)),
    "scaled mean and sum": lambda x, a, b: 0.3 * (average(x, a, b) + 0.01 * tf.reduce_sum(tf.square(x @ a))),
    "averaged": lambda x, a, b: tf.reduce_mean([average(x, a, b), tf.reduce_sum(tf.square(x @ a)), tf.nn.l2_loss(a)]),
    "trained scale": lambda x, a, b: tf.exp(b[0, 0]) * (average(x, a, b) + 0.01 * data(x, a, b)) - b[0, 0],
    "used twice": lambda x, a, b: twice(average(x, a, b), data(x, a, b)),
}

RATIOS = {
    "nearly zero": lambda x, a, b: masked(x, a, b) / (tf.reduce_sum(mask(x)) + 1e-9),
    "at least one, scaled": lambda x, a, b: masked(x, a, b) / tf.maximum(0.3 * tf.reduce_sum(mask(x)), 1.0),
    "never divided by zero": lambda x, a, b: tf.math.divide_no_nan(masked(x, a, b), tf.reduce_sum(mask(x))),
    "chosen": lambda x, a, b: tf.where(
        tf.reduce_sum(mask(x)) > 0, masked(x, a, b) / tf.maximum(tf.reduce_sum(mask(x)), 1e-3), tf.nn.l2_loss(b)
    ),
    "beside a mean": lambda x, a, b: (
        average(x, a, b) + tf.math.divide_no_nan(tf.reduce_sum(mask(x) * tf.square(x @ a)), tf.reduce_sum(mask(x)))
    ),
    "trained weights": lambda x, a, b: tf.reduce_sum(trust(x, a) * rows(x, a, b)) / tf.reduce_sum(trust(x, a)),
    "overlap": lambda x, a, b: (
        1
        - (2 * tf.reduce_sum(trust(x, a) * mask(x)) + 1) / (tf.reduce_sum(trust(x, a)) + tf.reduce_sum(mask(x)) + 1)
        + tf.nn.l2_loss(b)
    ),
    "root": lambda x, a, b: tf.sqrt(average(x, a, b)),
}


@pytest.mark.parametrize("name, shape", pairs(SCALED | RATIOS, SHAPES))
def test_many_replicas_train_what_one_does(name, shape, caplog):
    with caplog.at_level(logging.WARNING, "autodist"):
        check(shape, step_of, (SCALED | RATIOS)[name])
    assert not caplog.records


def step_of_several_targets():
    rng = np.random.default_rng(1)
    first = tf.Variable(rng.normal(size=(4, 2)), name="first")
    second = tf.Variable(rng.normal(size=(2, 1)), name="second")

    def step(x):
        with tf.GradientTape() as tape:
            targets = [average(x, first, second), 0.1 * data(x, first, second), tf.square(x @ first)]
        given = [tf.exp(second[0, 0]), tf.constant(1.0, tf.float64), mask(x) / tf.reduce_sum(1.0 + mask(x))]
        for v, g in zip([first, second], tape.gradient(targets, [first, second], given), strict=True):
            v.assign_sub(0.05 * g)
        return targets[:2]

    return step


@every_shape
def test_several_targets_have_a_weight_each(shape, caplog):
    with caplog.at_level(logging.WARNING, "autodist"):
        check(shape, step_of_several_targets)
    assert not caplog.records


def test_an_asynchronous_worker_goes_by_its_own_examples():
    def loss(x, a, b):  # its gradient does not depend on the other worker's writes
        return 0.3 * (tf.reduce_mean(x @ a) + 0.01 * tf.reduce_sum(x @ a)) + 0.1 * tf.reduce_sum(a) + tf.reduce_sum(b)

    captured = capture(step_of(loss), batches()[0][0])
    strategy = plan(captured.step, 2, 2, {"first": 2, "second": 2}, servers=1, asynchronous=True)
    found = train(captured, strategy, batches()[:1])
    before = {v.name.removesuffix(":0"): v.numpy() for v in captured.sources}
    (x,) = batches()[0]
    parts = (x[:4], x[4:])  # of two replicas each
    by_first = sum(0.3 * (part.mean(0) / 2 + 0.01 * part.sum(0))[:, np.newaxis] + 0.1 for part in parts)
    np.testing.assert_allclose(found.variable("first"), before["first"] - 0.05 * by_first, rtol=1e-12)
    np.testing.assert_allclose(found.variable("second"), before["second"] - 0.05 * 2.0, rtol=1e-12)


@pytest.mark.parametrize(
    "owners, options, told",
    [
        ({"first": 0, "second": 0}, {"staleness": 1}, "first has staleness: no step waits"),
        ({"first": 0}, {"asynchronous": True}, "first is updated by each worker alone, second by all workers together"),
    ],
)
def test_paces_at_which_the_whole_batch_is_not_known_are_refused(owners, options, told):
    captured = capture(step_of(SCALED["scaled mean and sum"]), batches()[0][0])
    with pytest.raises(StrategyError, match=told):
        rewritten(captured, plan(captured.step, 2, 1, owners, **options))


def test_ratios_by_class_are_those_of_the_batch():
    step = step_of(
        lambda x, a, b: tf.reduce_mean(
            1 - (tf.reduce_sum(tf.sigmoid(x @ a) * mask(x), 0) + 1) / (tf.reduce_sum(tf.sigmoid(x @ a), 0) + 1)
        ) + 0.0 * tf.reduce_sum(b)
    )  # fmt: skip
    captured = capture(step, batches()[0][0])
    found = train(captured, plan(captured.step, 1, 2), batches())
    alone = one_device(captured, step, batches())
    for name in ("first", "second"):
        np.testing.assert_allclose(found.variable(name), alone.variable(name), rtol=1e-12)


@every_shape
def test_a_part_of_unknown_kind_is_told_of_and_takes_even_batches_alone(shape, caplog):
    def loss(x, a, b):
        volume = tf.linalg.det(tf.matmul(x @ a, x @ a, transpose_a=True))
        return data(x, a, b) + 0.001 * volume

    captured = capture(step_of(loss), batches()[0][0])
    strategy = plan(captured.step, *shape)
    even, uneven = (np.random.default_rng(0).normal(size=(n, 4)) for n in (12, 13))
    with caplog.at_level(logging.WARNING, "autodist"):
        train(captured, strategy, [(even,)])
    assert "not known how this part of the loss depends on the batch" in caplog.text
    with pytest.raises(tf.errors.InvalidArgumentError, match="different numbers of examples"):
        train(captured, strategy, [(uneven,)])


ONE_WEIGHT = {
    "mean": average,
    "mean and penalty": lambda x, a, b: average(x, a, b) + 0.3 * tf.nn.l2_loss(a),
    "sum": lambda x, a, b: data(x, a, b) / 6,
    "as Keras divides": lambda x, a, b: tf.math.divide_no_nan(data(x, a, b), tf.cast(tf.shape(x)[0], x.dtype)),
}


@pytest.mark.parametrize("name, shape", pairs(ONE_WEIGHT, [(1, 1), (1, 2), (2, 1)]))
def test_nothing_is_left_of_seams_where_one_weight_suits_all(name, shape):
    captured = capture(step_of(ONE_WEIGHT[name]), batches()[0][0])
    (step, *_) = rewritten(captured, plan(captured.step, *shape))
    assert not step.gradient_calls[0].terms
    assert not [node.name for node in step.graph_def.node if "autodist_loss_value" in node.name]
    assert sum("autodist_loss_weight" in node.name for node in step.graph_def.node) <= 1


@pytest.mark.parametrize("shape", [(1, 2), (2, 2)])
def test_rows_and_a_mean_are_differentiated_in_one_call(shape):
    weight = tf.Variable(np.random.default_rng(1).normal(size=(4, 2)), name="weight")

    def step(x):
        with tf.GradientTape() as tape:
            each, mean = tf.reduce_sum(tf.square(x @ weight - 1.0), 1), tf.reduce_mean(tf.square(x @ weight))
        weight.assign_sub(0.01 * tape.gradient([each, mean], weight))
        return mean

    captured = capture(step, *batches()[0], is_split=True)
    trained = train(captured, plan(captured.step, *shape), batches())
    assert_same(trained, one_device(captured, step, batches()), 1e-11)
