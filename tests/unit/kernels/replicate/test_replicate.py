"""Replicate and the following kernels: one device's values, from replicas that see a part of each batch."""

from __future__ import annotations

import logging

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from autodist.errors import RewriteError
from autodist.graph.step import EXAMPLES, PlacedStep
from autodist.kernels.context import Context
from autodist.kernels.replicate.replicate import Replicate
from tests.unit.kernels.in_one_process import capture, plan, rewritten, train
from tests.unit.kernels.pairs import pairs
from tests.unit.kernels.replicate.steps import SHAPES, batches, check, every_shape, hardest_shape, labelled, variable
from tests.unit.kernels.rewrites import assert_rewrites, cases

pytestmark = pytest.mark.usefixtures("keras_in_float64")


CASES = {
    "the nodes that the batch reaches are copied, and the others run once": """
        v = VarHandleOp(shape=[4, 2])
        x = Placeholder(shape=[None, 4])
        w = ReadVariableOp(v)
        e = Exp(w)
      - y = MatMul(x, e)
      - run y
      + y = MatMul(autodist/split_batch/Slice, e)
      + autodist/replica_1/y = MatMul(autodist/split_batch/Slice_1, e)
      + autodist/examples = Placeholder(dtype=int64, shape=[])
      + run y, autodist/replica_1/y
    """,
    "every replica computes an output, and the step returns the combination": """
        v = VarHandleOp(shape=[4, 2])
        x = Placeholder(shape=[None, 4])
        axes = [0, 1]
        w = ReadVariableOp(v)
      - y = MatMul(x, w)
      + y = MatMul(autodist/split_batch/Slice, w)
        loss = Sum(y, axes)
      - return loss:0
      + autodist/replica_1/y = MatMul(autodist/split_batch/Slice_1, w)
      + autodist/replica_1/loss = Sum(autodist/replica_1/y, axes)
      + autodist/examples = Placeholder(dtype=int64, shape=[])
      + return autodist/output/0/Identity:0
    """,
}


@cases(CASES)
def test_rewrites(text):
    assert_rewrites(
        Replicate(), text, replicas=2, hides=("autodist/split_batch/", "autodist/output/"), inputs={"x:0": 0}
    )


def test_the_step_of_a_single_replica_has_the_captured_graph():
    captured = capture(gan(), *batches(4)[0])
    made = Replicate().apply(PlacedStep.of(captured.step), Context(plan(captured.step), 0))
    assert made.graph_def is captured.step.graph_def and made.reductions == ()


def test_a_copy_is_known_by_its_replica_its_captured_name_and_its_line() -> None:
    captured = capture(gan(), *batches(4)[0])
    made = Replicate().apply(PlacedStep.of(captured.step), Context(plan(captured.step, 1, 2), 0))
    theirs = {name: made.replica_of(name) for name in made.graph_index.nodes if made.replica_of(name)[0] == 1}
    assert theirs and all(made.replica_of(own) == (0, own) for _, own in theirs.values())
    lines = {name: captured.step.origin_of(own) for name, (_, own) in theirs.items()}
    assert any(lines.values()) and {name: made.origin_of(name) for name in theirs} == lines


def test_the_captured_item_is_left_alone():
    captured = capture(gan(), *batches(4)[0])
    before = captured.step.graph_def.SerializeToString(deterministic=True)
    rewritten(captured, plan(captured.step, 2, 2))
    assert captured.step.graph_def.SerializeToString(deterministic=True) == before


def gan():
    critic, maker = variable("critic", 4, 1), variable("maker", 4, 4)

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(x @ critic)) - tf.reduce_mean(tf.tanh(x @ maker) @ critic)
        critic.assign_sub(0.1 * tape.gradient(loss, critic))
        with tf.GradientTape() as tape:
            second = tf.reduce_mean(tf.square(tf.tanh(x @ maker) @ critic))
        maker.assign_sub(0.1 * tape.gradient(second, maker))
        return loss, second

    return step


OWNERS = {"all-reduce": None, "mixed": {"critic": 1}, "servers": {"critic": 1, "maker": 0}}


@pytest.mark.parametrize("owners, shape", pairs(OWNERS, SHAPES))
def test_two_optimizers_in_one_step(owners, shape):
    check(gan(), batches(6, 5, 1), shape, OWNERS[owners] if shape[0] > 1 else None)


@every_shape
def test_fewer_examples_than_replicas(shape):
    layer = layers.BatchNormalization()
    layer.build((None, 4))
    weight = variable("w", 4, 2)

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.math.log(tf.reduce_sum(tf.square(x @ weight), 1)))
        weight.assign_sub(0.1 * tape.gradient(loss, weight))
        return loss

    check(step, batches(1, 2, 1), shape)


@hardest_shape
def test_keras_logs_are_those_of_the_whole_batch(shape):
    model = keras.Sequential([keras.Input((4,)), layers.Dense(5, "tanh"), layers.Dense(3)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    model.optimizer.build(model.trainable_variables)
    model.train_on_batch(*labelled(2)[0])
    check(lambda x, y: model.train_step((x, y)), labelled(6, 5, 1), shape)


@hardest_shape
def test_weights_are_averaged_after_they_were_updated(shape):
    weight, average = variable("w", 4, 2), variable("average", 4, 2, trainable=False)

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(x @ weight))
        weight.assign_sub(0.1 * tape.gradient(loss, weight))
        average.assign(0.9 * average + 0.1 * weight)
        return loss, tf.reduce_sum(weight)

    check(step, batches(5, 4), shape, {"w": 1} if shape[0] > 1 else None)


CONDITIONAL = {
    "accumulation": lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2),
    "loss scale": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)),
}


@pytest.mark.parametrize("optimizer, shape", pairs(CONDITIONAL, SHAPES))
def test_updates_inside_an_if(optimizer, shape):
    weight = keras.Variable(np.random.default_rng(0).normal(size=(4, 2)), name="w")
    made = CONDITIONAL[optimizer]()
    made.build([weight])

    def step(x):
        with tf.GradientTape() as tape:
            loss = made.scale_loss(tf.reduce_mean(tf.square(x @ weight.value)))
        made.apply_gradients([(tape.gradient(loss, weight.value), weight)])
        return loss

    check(step, batches(5, 4, 3, 2), shape)


@pytest.mark.parametrize("shape", [(1, 2), (2, 1)])
def test_an_update_that_reads_rows_of_the_batch_is_refused(shape):
    weight = variable("w", 4, 1)

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(x @ weight)
        weight.assign_sub(tape.gradient(loss, weight) * x[0, 0])
        return loss

    captured = capture(step, *batches(4)[0])
    with pytest.raises(RewriteError, match=r"update \(mul_1\) reads .* differs .* cannot be combined"):
        rewritten(captured, plan(captured.step, *shape))


@pytest.mark.parametrize("shape", [(1, 2), (2, 1)])
def test_a_loss_of_weights_that_are_assigned_later_is_refused(shape):
    weight = variable("w", 4, 1)

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(x @ weight))
        change = tape.gradient(loss, weight)
        is_better = tf.reduce_mean(tf.square(x @ (weight - change))) < loss
        weight.assign_sub(tf.where(is_better, change, 0.1 * change))
        return loss

    captured = capture(step, *batches(4)[0])
    with pytest.raises(RewriteError, match=r"a row for each example.*line search.*first assign these to the variable"):
        rewritten(captured, plan(captured.step, *shape))


@hardest_shape
def test_an_update_may_read_the_loss(shape):
    weight = variable("w", 4, 1)

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(x @ weight))
        weight.assign_sub(loss * tape.gradient(loss, weight))
        return loss

    check(step, batches(5, 1), shape)


GUARDS = {
    "finite": lambda loss, gradient: tf.math.is_finite(loss) & (tf.norm(gradient) < 9.0),
    "root": lambda loss, gradient: tf.sqrt(loss) < 1.6,
    "ratio": lambda loss, gradient: tf.reduce_max(tf.abs(gradient)) / (1.0 + loss) < 1.0,
}


@pytest.mark.parametrize(
    "guard, shape, owners",
    [
        *((guard, (2, 2), None) for guard in GUARDS),
        *((guard, (2, 1), {"w": 1}) for guard in GUARDS),
        ("root", (1, 2), None),
    ],
)
def test_an_update_may_depend_on_a_function_of_the_loss(guard, shape, owners):
    weight, skipped = variable("w", 4, 1), variable("skipped", 1)

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(x @ weight))
        gradient = tape.gradient(loss, weight)
        if GUARDS[guard](loss, gradient):
            weight.assign_sub(0.1 * gradient)
        else:
            skipped.assign_add([1.0])
        return loss

    found = check(step, batches(5, 4, 3, 2), shape, owners)
    assert int(found.variables[-1]["skipped"][0]) == {"finite": 0, "root": 1, "ratio": 2}[guard]


def unknown_loss():
    weight = variable("w", 4, 1)

    def step(x):
        with tf.GradientTape() as tape:
            volume = tf.linalg.det(tf.matmul(x, x, transpose_a=True))
            loss = volume + 0.0 * tf.reduce_sum(weight)
        weight.assign_sub(1e-3 * tape.gradient(loss, weight))
        return loss

    return step


@every_shape
def test_a_loss_of_unknown_kind_takes_even_batches_alone(shape, caplog):
    step, data = unknown_loss(), batches(12)
    captured = capture(step, *data[0])
    with caplog.at_level(logging.WARNING, "autodist"):
        strategy = plan(captured.step, *shape)
        train(captured, strategy, data)
    assert "it is not known how the loss depends on the batch" in caplog.text
    with pytest.raises(tf.errors.InvalidArgumentError, match="different numbers of examples"):
        train(captured, strategy, batches(13))


@pytest.mark.parametrize("standardises", [False, True])
def test_it_is_told_of_where_examples_see_one_another(standardises, caplog):
    weight = variable("w", 4, 1)

    def step(x):
        with tf.GradientTape() as tape:
            seen = x - tf.reduce_mean(x, 0, name="average") if standardises else x
            loss = tf.reduce_mean(tf.square(seen @ weight))
        weight.assign_sub(0.1 * tape.gradient(loss, weight))
        return loss

    captured = capture(step, np.ones((1, 4)))
    with caplog.at_level(logging.INFO, "autodist"):
        rewritten(captured, plan(captured.step, 1, 2))
    assert ("examples see one another in the model" in caplog.text) == standardises


def test_replicas_draw_different_numbers_and_repeat_them():
    weight = variable("w", 1)
    generator = keras.random.SeedGenerator(3)

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(x * weight)
        weight.assign_sub(0.0 * tape.gradient(loss, weight))
        stateful = tf.random.uniform(tf.shape(x), seed=5, dtype=tf.float64)
        return stateful, keras.random.uniform(tf.shape(x), seed=generator)

    data = [(np.zeros((4, 1)),)] * 2
    captured = capture(step, *data[0])
    runs = [train(captured, plan(captured.step, *shape), data) for shape in ((1, 2), (1, 2), (2, 1))]
    for number in range(2):
        stateful, stateless = runs[0].outputs[number][0]
        assert len(np.unique(stateful)) == len(np.unique(stateless)) == 4
        np.testing.assert_array_equal(stateless, runs[1].outputs[number][0][1])
        between = np.concatenate([worker[1] for worker in runs[2].outputs[number]])
        np.testing.assert_array_equal(stateless, between)
    assert not np.array_equal(runs[0].outputs[0][0][1], runs[0].outputs[1][0][1])
    seeds = [run.variable(next(n for n in run.variables[0] if "seed" in n)) for run in runs]
    np.testing.assert_array_equal(seeds[0], seeds[2])


def test_the_number_of_examples_is_an_input_of_the_rewritten_step():
    captured = capture(gan(), *batches(4)[0])
    (step,) = rewritten(captured, plan(captured.step, 1, 2))
    assert EXAMPLES in step.inputs and EXAMPLES not in captured.step.inputs


def test_gradients_of_a_frozen_variable_are_not_reduced():
    weight, frozen = variable("w", 4, 1), variable("frozen", 4, 1, trainable=False)

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(frozen)
            loss = tf.reduce_mean(tf.square(x @ (weight + frozen)))
        mine, _ = tape.gradient(loss, [weight, frozen])
        weight.assign_sub(0.1 * mine)
        return loss

    found = check(step, batches(5), (2, 1))
    assert found.variables[0].keys() >= {"w", "frozen"}
