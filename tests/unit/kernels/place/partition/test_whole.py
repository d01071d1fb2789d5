"""Ops that take a handle, and ops that cannot run shard by shard, work on the whole variable."""

from __future__ import annotations

import logging
from collections.abc import Callable

import keras
import numpy as np
import pytest
import tensorflow as tf

from autodist.errors import StrategyError
from autodist.kernels import Context, rewrite
from autodist.placement.partitioning import Partitioning
from tests.unit.kernels.in_one_process import capture, plan
from tests.unit.kernels.pairs import pairs
from tests.unit.kernels.place.partition.shards import (
    assert_trains_alike,
    cut_in_strategy,
    every_cut,
    numbers,
    partitioned,
    sharded_plan,
)

CUT = {"v": Partitioning(0, (1, 3))}
SERVERS = pytest.mark.parametrize("by_server", [True, False], ids=["servers", "all-reduce"])


def while_loop(v: tf.Variable, x: tf.Tensor) -> tf.Tensor:
    return tf.while_loop(lambda k, _: k < 3, lambda k, y: (k + 1, tf.tanh(y * tf.reduce_mean(v, 1) + v[0, 0])), (0, x))[
        1
    ]


def map_fn(v: tf.Variable, x: tf.Tensor) -> tf.Tensor:
    return tf.map_fn(lambda row: tf.tensordot(row, tf.tanh(v), 1), x)


def cond(v: tf.Variable, x: tf.Tensor) -> tf.Tensor:
    return tf.cond(tf.reduce_sum(v) > 0.0, lambda: x @ v, lambda: x @ tf.sin(v))


def recomputed(v: tf.Variable, x: tf.Tensor) -> tf.Tensor:
    return tf.recompute_grad(lambda y: tf.tanh(y @ v))(x)


@pytest.mark.parametrize("use, by_server", pairs([while_loop, map_fn, cond, recomputed], [False, True]))
def test_a_function_that_takes_the_handle_reads_the_whole(use: Callable[..., tf.Tensor], by_server: bool):
    v = tf.Variable(numbers(0, 4, 4), name="v")

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(use(v, x) - 1.0))
        v.assign_sub(0.1 * tape.gradient(loss, v))
        return loss

    batches = [(numbers(k, 6, 4),) for k in range(3)]
    captured = capture(step, *batches[0])
    assert_trains_alike(captured, step, sharded_plan(captured.step, CUT, by_server=by_server), batches)


def gathered_nd(v: tf.Variable, x: tf.Tensor) -> tf.Tensor:
    places = tf.cast(tf.abs(x[:, :2]), tf.int32) % 4
    return x[:, :1] * tf.gather_nd(v, places)[:, None]


def gathered_in_batches(v: tf.Variable, x: tf.Tensor) -> tf.Tensor:
    return x @ tf.gather(v, [[0, 1], [2, 3], [3, 3], [1, 0]], batch_dims=1)


@pytest.mark.parametrize("use, axis", [(gathered_nd, 0), (gathered_nd, 1), (gathered_in_batches, 0)])
def test_a_gather_of_elements_reads_the_whole_and_needs_no_copy(
    use: Callable[..., tf.Tensor], axis: int, caplog: pytest.LogCaptureFixture
):
    v = tf.Variable(numbers(0, 4, 4), name="v")

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(use(v, x) - 1.0))
        v.assign_sub(0.1 * tf.convert_to_tensor(tape.gradient(loss, v)))
        return loss

    batches = [(numbers(k, 5, 4),) for k in range(2)]
    captured = capture(step, *batches[0])
    strategy = sharded_plan(captured.step, {"v": Partitioning(axis, (1, 3))})
    assert_trains_alike(captured, step, strategy, batches)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.parametrize("by_server, workers, replicas", [(True, 2, 1), (False, 2, 2)])
def test_a_step_keeps_statistics_of_what_a_called_function_makes_of_the_whole(
    by_server: bool, workers: int, replicas: int
):
    v, spread = tf.Variable(numbers(0, 4, 4), name="v"), tf.Variable(np.ones(4), trainable=False, name="spread")
    called = tf.function(lambda x: tf.tanh(x @ v)).get_concrete_function(tf.TensorSpec([None, 4], tf.float64))

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            made = called(x)
            loss = tf.reduce_mean(tf.square(made - 1.0))
        v.assign_sub(0.1 * tape.gradient(loss, v))
        spread.assign(tf.math.reduce_std(made, 0))
        return loss

    batches = [(numbers(k, n, 4),) for k, n in enumerate((6, 5, 1))]
    captured = capture(step, *batches[0])
    strategy = sharded_plan(captured.step, CUT, workers, replicas, by_server)
    assert_trains_alike(captured, step, strategy, batches)


def writes_in_a_branch(v: tf.Variable, count: tf.Tensor, gradient: tf.Tensor) -> None:
    tf.cond(count % 2 == 0, lambda: v.assign_sub(0.1 * gradient), lambda: v.assign(0.9 * v))


@pytest.mark.parametrize("place", ["compute", "update"])
def test_a_worker_without_replicas_updates_its_shards(place: str):
    v = tf.Variable(numbers(0, 4, 4), name="v")
    seen = tf.Variable(0, dtype=tf.int64, trainable=False, name="seen")

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square((while_loop(v, x) if place == "compute" else x @ v) - 1.0))
        gradient = tape.gradient(loss, v)
        if place == "update":
            writes_in_a_branch(v, seen.assign_add(1), gradient)
        v.assign_sub(0.1 * tf.clip_by_norm(gradient, 0.1))
        return loss

    batches = [(numbers(k, 6, 4),) for k in range(3)]
    captured = capture(step, *batches[0])
    strategy = plan(captured.step, workers=2, servers=1)
    cut_in_strategy(strategy, "v", Partitioning(0, (1, 1, 2)), owners=[2, 0, 1])
    assert_trains_alike(captured, step, strategy, batches)


def test_a_branch_that_writes_is_refused_where_each_gradient_is_applied_alone():
    v = tf.Variable(numbers(0, 4, 4), name="v")

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(x @ v - 1.0))
        gradient = tape.gradient(loss, v)
        writes_in_a_branch(v, tf.cast(tf.reduce_sum(gradient), tf.int64), gradient)
        return loss

    captured = capture(step, numbers(0, 6, 4))
    strategy = sharded_plan(captured.step, CUT)
    for shard in strategy.nodes[0].shards:
        shard.parameter_server.asynchronous = True
    with pytest.raises(StrategyError, match=r"v is partitioned, and If \(cond\) writes it as a whole.*sync: true"):
        rewrite(captured.step, Context(strategy, 0))


def test_two_functions_of_a_step_see_the_value_of_their_time():
    v = tf.Variable(numbers(0, 4, 4), name="v")

    def step(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(while_loop(v, x) - 1.0))
        v.assign_sub(0.1 * tape.gradient(loss, v))
        return loss, tf.reduce_mean(while_loop(v, x))

    batches = [(numbers(k, 6, 4),) for k in range(3)]
    captured = capture(step, *batches[0])
    assert_trains_alike(captured, step, sharded_plan(captured.step, CUT), batches)


@pytest.mark.usefixtures("keras_in_float64")
def test_a_recurrent_layer_has_its_weights():
    layers = [keras.layers.Embedding(7, 4), keras.layers.LSTM(5), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((3,), dtype="int32"), *layers])
    optimizer = keras.optimizers.Adam(0.01)
    optimizer.build(model.trainable_variables)

    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x) - y))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    rng = np.random.default_rng(0)
    batches = [(rng.integers(0, 7, (6, 3)).astype(np.int32), rng.normal(size=(6, 1))) for _ in range(3)]
    captured = capture(step, *batches[0])
    strategy = sharded_plan(captured.step, every_cut(captured.step))
    assert_trains_alike(captured, step, strategy, batches)


@SERVERS
def test_a_branch_that_writes_the_variable_writes_its_shards(by_server: bool):
    v = tf.Variable(numbers(0, 4, 4), name="v")
    seen = tf.Variable(0, dtype=tf.int64, trainable=False, name="seen")

    def step(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(x @ v - 1.0))
        gradient = tape.gradient(loss, v)
        writes_in_a_branch(v, seen.assign_add(1), gradient)
        v.assign_sub(0.01 * gradient)
        return loss, tf.reduce_sum(v)

    batches = [(numbers(k, 6, 4),) for k in range(4)]
    captured = capture(step, *batches[0])
    strategy = sharded_plan(captured.step, CUT, by_server=by_server)
    _, told = partitioned(captured.step, strategy)
    assert any("v is partitioned, and is concatenated for If" in line and "which writes it" in line for line in told)
    assert_trains_alike(captured, step, strategy, batches)
