"""Inputs with different numbers of rows: each is split and weighted by its own number."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf

from autodist.capture.function import CapturedFunction
from tests.unit.kernels.in_one_process import Session, assert_same, capture, one_device, plan, train

Step = Callable[[tf.Tensor, tf.Tensor, tf.Tensor], object]


def variables() -> tuple[tf.Variable, tf.Variable]:
    rng = np.random.default_rng(1)
    return tf.Variable(rng.normal(size=(3, 2)), name="w"), tf.Variable(rng.normal(size=(2, 1)), name="v")


def two_calls() -> Step:
    """As SimCLR: an encoder is trained on the one input, a probe on the other."""
    w, v = variables()
    count = tf.Variable(0.0, dtype=tf.float64, name="count", aggregation=tf.VariableAggregation.SUM)

    def step(x: tf.Tensor, z: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, ...]:
        with tf.GradientTape() as tape:
            first = tf.reduce_mean((tf.tanh(x @ w) - 0.5) ** 2)
        w.assign_sub(0.3 * tape.gradient(first, w))
        with tf.GradientTape() as tape:
            second = tf.reduce_mean((tf.tanh(z @ w) @ v - labels) ** 2)
        v.assign_sub(0.3 * tape.gradient(second, v))
        count.assign_add(tf.cast(tf.shape(z)[0], tf.float64))
        return first, second, tf.reduce_sum(labels)

    return step


def one_loss() -> Step:
    w, v = variables()

    def step(x: tf.Tensor, z: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.tanh(x @ w) - 0.5) ** 2)
            loss += 0.5 * tf.reduce_mean((tf.tanh(z @ w) @ v - labels) ** 2) + 0.01 * tf.reduce_sum(z @ w)
        by_w, by_v = tape.gradient(loss, [w, v])
        w.assign_sub(0.3 * by_w)
        v.assign_sub(0.3 * by_v)
        return loss

    return step


def alike() -> Step:
    """Returns a step in which the mean of one input is subtracted from each example of the other."""
    w, v = variables()

    def step(x: tf.Tensor, z: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        middle = tf.distribute.get_replica_context().all_reduce(
            "SUM", [tf.reduce_sum(z, 0), tf.cast(tf.shape(z)[0], z.dtype)]
        )
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.tanh((x - middle[0] / middle[1]) @ w) @ v) ** 2)
        by_w, by_v = tape.gradient(loss, [w, v])
        w.assign_sub(0.3 * by_w)
        v.assign_sub(0.3 * by_v)
        return loss

    return step


def batches(*sizes: tuple[int, int]) -> list[tuple[np.ndarray, ...]]:
    rng = np.random.default_rng(0)
    return [(rng.normal(size=(n, 3)), rng.normal(size=(m, 3)), rng.normal(size=(m, 1))) for n, m in sizes]


def captured(step: Step, is_global: bool = False) -> CapturedFunction:
    found = capture(step, *batches((6, 4))[0], is_global=is_global)
    _, z, labels = found.inputs
    return dataclasses.replace(found, step=dataclasses.replace(found.step, apart={z: z, labels: z}))


@pytest.mark.parametrize(
    ("make", "shape", "is_global"),
    [
        (two_calls, (2, 2), False),
        (two_calls, (2, 1), True),
        (one_loss, (1, 2), True),
        (one_loss, (2, 2), False),
        (alike, (2, 2), False),
    ],
)
def test_training_is_that_of_one_device(make: Callable[[], Step], shape: tuple[int, int], is_global: bool) -> None:
    step, data = make(), batches((24, 8), (9, 5), (4, 7), (6, 6))
    found = captured(step, is_global)
    assert_same(train(found, plan(found.step, *shape), data), one_device(found, step, data))


def test_owners_get_them_too() -> None:
    step, data = two_calls(), batches((24, 8), (9, 5))
    found = captured(step)
    assert_same(train(found, plan(found.step, 2, owners={"w": 0, "v": 1}), data), one_device(found, step, data))


def test_both_inputs_have_to_be_even_if_the_dependence_of_a_loss_on_them_is_unknown() -> None:
    w, _ = variables()

    def step(x: tf.Tensor, z: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            near = tf.nn.log_softmax(tf.matmul(x @ w, tf.concat([x, z], 0) @ w, transpose_b=True))
            loss = tf.reduce_mean(near**2)
        w.assign_sub(0.1 * tape.gradient(loss, w))
        return loss

    found = captured(step)
    for sizes in ((6, 5), (7, 4)):
        session = Session(found, plan(found.step, 2))
        session.train(batches((6, 4)))
        with pytest.raises(tf.errors.InvalidArgumentError, match="different numbers of examples"):
            session.train(batches(sizes))
