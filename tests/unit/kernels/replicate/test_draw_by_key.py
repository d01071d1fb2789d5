"""Draws for each example with a seed shared by all replicas."""

from __future__ import annotations

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

from autodist.placement.partitioning import Partitioning
from tests.unit.kernels.in_one_process import assert_same, capture, one_device, plan, train
from tests.unit.kernels.place.partition.shards import sharded_plan

F64 = tf.float64


def of_a_shape(x, _):
    return x + tf.random.stateless_normal(tf.shape(x), [1, 2], dtype=F64)


def by_a_count_of_steps(x, count):
    return x * tf.random.stateless_uniform([tf.shape(x)[0], 1], [count, 2], dtype=F64)


def by_a_key_that_was_split(x, count):
    first, second = tf.unstack(tf.random.split(tf.random.fold_in([1, 2], count), 2))
    return x + tf.random.stateless_normal(tf.shape(x), first, dtype=F64) * tf.random.stateless_normal(
        [3], second, dtype=F64
    )


def of_a_distribution(x, _):
    waits = tf.random.stateless_gamma(tf.shape(x), [1, 2], alpha=tf.constant([1.0, 2.0, 3.0], F64), dtype=F64)
    counts = tf.random.stateless_poisson(tf.shape(x), [1, 2], lam=tf.constant(3.0, F64), dtype=F64)
    return x + waits + counts + tf.random.stateless_truncated_normal(tf.shape(x), [1, 2], dtype=F64)


def several_for_each(x, _):
    pairs = tf.reshape(tf.stack([x, 2 * x], 1), [-1, 3])
    pairs += tf.random.stateless_normal(tf.shape(pairs), [1, 2], dtype=F64)
    return tf.reduce_sum(tf.reshape(pairs, [-1, 2, 3]), 1)


def along_another_axis(x, _):
    times = tf.transpose(tf.stack([x, 2 * x], 1), [1, 0, 2])
    return tf.reduce_sum(times * tf.random.stateless_normal(tf.shape(times), [1, 2], dtype=F64), 0)


def by_seeds_of_examples(x, _):
    seeds = tf.random.stateless_uniform([tf.shape(x)[0], 2], [1, 2], None, None, dtype=tf.int32)
    return tf.map_fn(
        lambda pair: pair[0] + tf.random.stateless_normal([3], pair[1], dtype=F64), (x, seeds), fn_output_signature=F64
    )


def computed_anew(x, _):
    @tf.recompute_grad
    def noisy(y):
        return y * tf.random.stateless_normal(tf.shape(y), [1, 2], dtype=F64)

    return noisy(x)


def dropped(x, _):
    return tf.nn.experimental.stateless_dropout(keras.random.dropout(x, 0.3, seed=1), 0.3, seed=[1, 2])


def in_a_loop(x, _):
    def turn(k, y):
        return k + 1, y + 0.1 * tf.random.stateless_normal(tf.shape(y), tf.random.fold_in([1, 2], k), dtype=F64)

    return tf.while_loop(lambda k, _: k < 3, turn, (0, x))[1]


def in_a_branch(x, count):
    return tf.cond(
        count % 2 == 0,
        lambda: x * tf.random.stateless_uniform(tf.shape(x), [count, 2], dtype=F64),
        lambda: x + tf.random.stateless_normal(tf.shape(x), [1, 2], dtype=F64),
    )


def in_branches_of_a_loop(x, _):
    def noisy(k, y):
        return y + tf.random.stateless_normal(tf.shape(y), [k, 2], dtype=F64)

    def turn(k, y):
        turns = [lambda: noisy(k, y), lambda: 2 * y, lambda: noisy(k, noisy(k + 1, y))]
        return k + 1, tf.switch_case(tf.convert_to_tensor(k % 3), turns)

    return tf.while_loop(lambda k, _: k < 4, turn, (0, x))[1]


def in_a_called_function(x, _):
    noisy = tf.function(lambda y: y + tf.random.stateless_normal(tf.shape(y), [1, 2], dtype=F64))
    return noisy.get_concrete_function(tf.TensorSpec([None, 3], F64))(x)


def several_for_each_in_a_loop(x, _):
    def turn(k, y):
        return k + 1, y + tf.random.stateless_normal(tf.shape(y), [k, 2], dtype=F64)

    pairs = tf.while_loop(lambda k, _: k < 2, turn, (0, tf.reshape(tf.stack([x, 2 * x], 1), [-1, 3])))[1]
    return tf.reduce_sum(tf.reshape(pairs, [-1, 2, 3]), 1)


IN_FUNCTIONS = [in_a_loop, in_a_branch, in_branches_of_a_loop, in_a_called_function, several_for_each_in_a_loop]
STEPS = [
    of_a_shape, by_a_count_of_steps, by_a_key_that_was_split, of_a_distribution, several_for_each, along_another_axis,
    by_seeds_of_examples, computed_anew, dropped, *IN_FUNCTIONS,
]  # fmt: skip


def model(noisy, **options):
    """A step that is trained by examples that `noisy` makes of those that are fed and of the number of the step."""
    weight = tf.Variable(np.linspace(-1, 1, 6).reshape(3, 2), name="weight")
    count = tf.Variable(0, name="count", trainable=False)

    def step(x):
        with tf.GradientTape() as tape:
            made = noisy(x, count.read_value())
            loss = tf.reduce_mean(tf.square(tf.matmul(made, weight)))
        weight.assign_sub(0.1 * tape.gradient(loss, weight))
        count.assign_add(1)
        return loss

    return capture(step, np.ones((6, 3)), **options), step


def batches(*sizes):
    rng = np.random.default_rng(1)
    return [(rng.normal(size=(size, 3)),) for size in sizes]


@pytest.mark.parametrize("noisy", STEPS)
def test_replicas_have_the_numbers_of_one_device(noisy):
    """Also for replicas with different numbers of examples, or none."""
    captured, step = model(noisy, is_global=True)
    fed = batches(6, 5, 2)
    assert_same(train(captured, plan(captured.step, 2, 2), fed), one_device(captured, step, fed))


def test_they_have_them_on_one_worker_by_what_it_is_fed():
    captured, step = model(of_a_shape)
    fed = batches(6, 5, 2)
    assert_same(train(captured, plan(captured.step, 1, 3), fed), one_device(captured, step, fed))


@pytest.mark.parametrize("noisy", [in_a_loop, in_a_branch])
def test_they_have_them_where_xla_compiles_the_rest(noisy):
    captured, step = model(noisy, is_global=True, jit_compile=True)
    fed = batches(6, 5)
    assert_same(train(captured, plan(captured.step, 1, 2), fed), one_device(captured, step, fed))


@pytest.mark.parametrize("by_server", [False, True])
def test_they_have_them_where_variables_are_cut(by_server):
    captured, step = model(several_for_each_in_a_loop, is_global=True)
    strategy = sharded_plan(captured.step, {"weight": Partitioning(0, (1, 2))}, 2, 2, by_server)
    fed = batches(6, 5, 2)
    assert_same(train(captured, strategy, fed), one_device(captured, step, fed))


def by_a_distribution_of_examples(x, _):
    return x + tf.random.stateless_gamma(tf.shape(x), [1, 2], alpha=2 + 0 * x, dtype=F64)


def of_classes(x, _):
    return tf.cast(tf.random.stateless_categorical(0 * x, 8, [1, 2]), F64)[:, :3]


def of_classes_in_a_branch(x, _):
    return tf.cond(tf.reduce_sum(x) > 0.0, lambda: of_classes(x, None), lambda: x)


@pytest.mark.parametrize("noisy, options", [(of_a_shape, {}), (by_a_distribution_of_examples, {"is_global": True}),
                                            (of_classes, {"is_global": True}), (in_a_loop, {}), (in_a_branch, {}),
                                            (of_classes_in_a_branch, {"is_global": True})])  # fmt: skip
def test_each_replica_draws_its_own_where_those_of_one_device_are_not_known(noisy, options):
    weight = tf.Variable(np.ones((3, 1)), name="weight")

    def step(x):
        with tf.GradientTape() as tape:
            made = noisy(x, tf.constant(0))
            loss = tf.reduce_mean(tf.matmul(made, weight))
        weight.assign_sub(tape.gradient(loss, weight))
        return made

    captured = capture(step, np.ones((6, 3)), **options)
    trained = train(captured, plan(captured.step, 2, 2), [(np.ones((8, 3)),)] * 2)
    for drawn in ([output for (output,) in outputs] for outputs in trained.outputs):
        rows = np.concatenate(drawn)
        assert all((a != b).any() for a, b in itertools.combinations(np.split(rows, 4), 2))
    np.testing.assert_array_equal(*(np.concatenate([o for (o,) in outputs]) for outputs in trained.outputs))
