"""Steps that compute all their gradients in branches of tf.cond train as on one device."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from autodist.errors import CaptureError
from tests.unit.kernels.in_one_process import assert_same, capture, one_device, plan, train
from tests.unit.kernels.pairs import pairs

Step = Callable[[tf.Tensor], Any]
SIZES = (8, 7, 3, 5)


def variable(name: str, shape: tuple[int, ...] = (3, 2)) -> tf.Variable:
    return tf.Variable(np.random.default_rng(len(name)).normal(size=shape), name=name)


def counter() -> tf.Variable:
    return tf.Variable(0, dtype=tf.int64, trainable=False, name="count")


def descend(weight: tf.Variable, loss_of: Callable[[], tf.Tensor], rate: float = 0.1) -> tf.Tensor:
    with tf.GradientTape() as tape:
        loss = loss_of()
    weight.assign_sub(rate * tape.gradient(loss, weight))
    return loss


def two_models_in_turns() -> Step:
    first, second, count = variable("a"), variable("bb"), counter()
    optimizers = [keras.optimizers.Adam(0.1), keras.optimizers.SGD(0.1, momentum=0.9)]
    for optimizer, weight in zip(optimizers, (first, second), strict=True):
        optimizer.build([weight])

    def step(x: tf.Tensor) -> tf.Tensor:
        count.assign_add(1)
        if count % 2 == 0:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((x @ first) ** 2)
            optimizers[0].apply_gradients([(tape.gradient(loss, first), first)])
        else:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((x @ second - 1.0) ** 2)
            optimizers[1].apply_gradients([(tape.gradient(loss, second), second)])
        return loss

    return step


def branches_within_branches() -> Step:
    """One branch reads what the other trains; sums and means."""
    first, second, count = variable("a"), variable("bb"), counter()

    def step(x: tf.Tensor) -> tf.Tensor:
        count.assign_add(1)
        if count > 0:
            if count % 2 == 0:
                loss = descend(first, lambda: 0.01 * tf.reduce_sum((x @ first) ** 2))
            else:
                loss = descend(second, lambda: tf.reduce_mean((x @ second @ tf.transpose(first)) ** 2))
        else:
            loss = tf.zeros([], tf.float64)
        return loss

    return step


def if_the_loss_is_large() -> Step:
    """The condition is a mean of the batch."""
    weight = variable("a")

    def step(x: tf.Tensor) -> tf.Tensor:
        if tf.reduce_mean((x @ weight) ** 2) > 20.0:
            loss = descend(weight, lambda: tf.reduce_mean((x @ weight) ** 2), 0.01)
        else:
            loss = descend(weight, lambda: tf.reduce_mean((x @ weight - 1.0) ** 2), 0.001)
        return loss

    return step


def with_statistics_of_the_batch() -> Step:
    weight, count = variable("a"), counter()

    def step(x: tf.Tensor) -> tf.Tensor:
        count.assign_add(1)
        if count % 2 == 1:
            loss = descend(weight, lambda: tf.reduce_mean((x @ weight - tf.math.reduce_std(x @ weight)) ** 2))
        else:
            loss = tf.reduce_mean(x)
        return loss

    return step


def rows_of_a_table() -> Step:
    table, count = variable("table", (10, 2)), counter()
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build([table])

    def step(x: tf.Tensor) -> tf.Tensor:
        count.assign_add(1)
        numbers = tf.cast(tf.abs(x[:, 0]), tf.int32) % 10
        if count % 2 == 0:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.gather(table, numbers) ** 2)
            optimizer.apply_gradients([(tape.gradient(loss, table), table)])
        else:
            loss = tf.reduce_mean(x)
        return loss

    return step


STEPS = [
    two_models_in_turns,
    branches_within_branches,
    if_the_loss_is_large,
    with_statistics_of_the_batch,
    rows_of_a_table,
]


@pytest.fixture(autouse=True)
def in_float64() -> Any:
    before = keras.config.floatx()
    keras.config.set_floatx("float64")
    yield
    keras.config.set_floatx(before)


def batches() -> list[tuple[np.ndarray]]:
    rng = np.random.default_rng(0)
    return [(rng.normal(3.0, 2.0, size=(n, 3)),) for n in SIZES]


@pytest.mark.feature("function", "step: gradients in tf.cond")
@pytest.mark.parametrize("make, shape", pairs(STEPS, [(1, 2), (2, 2)]))
def test_both_branches_are_synchronized(
    make: Callable[[], Step], shape: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    step, data = make(), batches()
    with caplog.at_level(logging.INFO, "autodist"):
        captured = capture(step, *data[0], is_split=True)
        trained = train(captured, plan(captured.step, *shape), data)
    assert_same(trained, one_device(captured, step, data), 1e-10)
    assert "each step computes both branches" in caplog.text
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


def test_branches_return_rows_of_the_examples() -> None:
    weight, count = variable("a"), counter()

    def step(x: tf.Tensor) -> tf.Tensor:
        count.assign_add(1)
        if count % 2 == 0:
            rows = x @ weight
            descend(weight, lambda: tf.reduce_mean((x @ weight) ** 2))
        else:
            rows = -x @ weight
        return rows

    data = batches()
    captured = capture(step, *data[0], is_split=True)
    assert_same(train(captured, plan(captured.step, 1, 3), data), one_device(captured, step, data), 1e-10)


def test_branches_return_values_of_other_kinds() -> None:
    """Numbers of NumPy, a variable of Keras, and vectors of which one is broadcast."""
    weight, count = variable("a"), counter()
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build([weight])

    def step(x: tf.Tensor) -> Any:
        count.assign_add(1)

        def train_it() -> Any:
            loss = descend(weight, lambda: tf.reduce_mean((x @ weight) ** 2))
            optimizer.iterations.assign_add(1)
            return loss, tf.convert_to_tensor(optimizer.iterations), np.float64(1.0)

        def skip() -> Any:
            return np.float64(0.0), optimizer.iterations, np.float64(2.0)

        return tf.cond(count % 2 == 0, train_it, skip)

    data = batches()
    captured = capture(step, *data[0], is_split=True)
    assert_same(train(captured, plan(captured.step, 2, 2), data), one_device(captured, step, data), 1e-10)


def test_numbers_may_be_drawn_in_a_branch(caplog: pytest.LogCaptureFixture) -> None:
    weight, count = variable("a"), counter()

    def step(x: tf.Tensor) -> tf.Tensor:
        count.assign_add(1)
        if count % 2 == 0:
            noise = tf.random.normal(tf.shape(x), dtype=x.dtype)
            loss = descend(weight, lambda: tf.reduce_mean(((x + noise) @ weight) ** 2))
        else:
            loss = tf.reduce_mean(x)
        return loss

    data = batches()
    captured = capture(step, *data[0], is_split=True)
    before = captured.sources[0].numpy()
    trained = train(captured, plan(captured.step, 1, 2), data)
    assert np.isfinite(trained.variable("a")).all() and not np.allclose(trained.variable("a"), before)


def printing(x: tf.Tensor, weight: tf.Variable) -> tf.Tensor:
    if tf.reduce_mean(x) > 0.0:
        tf.print("positive")
        loss = descend(weight, lambda: tf.reduce_mean((x @ weight) ** 2))
    else:
        loss = tf.reduce_mean(x)
    return loss


def switching(x: tf.Tensor, weight: tf.Variable) -> Any:
    branches = [lambda k=k: descend(weight, lambda: tf.reduce_mean((x @ weight - k) ** 2)) for k in (0.0, 1.0)]
    return tf.switch_case(tf.cast(x[0, 0] > 0.0, tf.int32), branches)


@pytest.mark.parametrize(
    "body, told",
    [
        (printing, r"tf.cond \(.*test_training_branches.py:\d+\), and a branch contains PrintV2"),
        (switching, "inside a tf.while_loop or tf.switch_case"),
    ],
)
def test_other_conditionals_are_refused(body: Callable[[tf.Tensor, tf.Variable], tf.Tensor], told: str) -> None:
    weight = variable("a")
    with pytest.raises(CaptureError, match=told):
        capture(lambda x: body(x, weight), *batches()[0], is_split=True)
