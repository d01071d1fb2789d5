"""Stale parameter servers: the gradients of one step are one update, applied in the background."""

from __future__ import annotations

from functools import lru_cache

import keras
import numpy as np
import pytest
import tensorflow as tf

from autodist.errors import StrategyError
from autodist.graph.editor import GraphEditor
from autodist.graph.effects import Effects
from autodist.graph.names import node_of
from autodist.kernels import Context, rewrite
from tests.unit.kernels.drawn_steps import OPTIMIZERS, Choices, make_batches, make_step
from tests.unit.kernels.in_one_process import capture, one_device, plan, rewritten, train
from tests.unit.kernels.pairs import pairs

OWNED = ("table", "kernel", "gain")
OWNERS = {
    "one owner": dict.fromkeys(OWNED, 1),
    "server": dict.fromkeys(OWNED, 2),
    "three owners": {"table": 0, "kernel": 1, "gain": 2},
}


def linear_step(optimizer: keras.optimizers.Optimizer):
    """A loss whose gradients do not depend on the variables, so that their staleness does not matter."""
    rng = np.random.default_rng(1)
    table = keras.Variable(rng.normal(size=(7, 2)), dtype="float64", name="table")
    kernel = keras.Variable(rng.normal(size=2), dtype="float64", name="kernel")
    gain = keras.Variable(0.5, dtype="float64", name="gain")
    trained = [table, kernel, gain]
    optimizer.build(trained)

    def step(ids: tf.Tensor, x: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            rows = tf.reduce_sum(tf.gather(table.value, ids), 1)
            loss = tf.reduce_mean(rows * x + x * kernel.value + gain.value * x)
        gradients = tape.gradient(loss, [v.value for v in trained])
        optimizer.apply_gradients(zip(gradients, trained, strict=True))

    return step


@lru_cache(maxsize=1)  # for all strategies
def on_one_device(optimizer: str):
    batches = make_batches(3, [5, 1, 4])
    step = linear_step(OPTIMIZERS[optimizer]())
    captured = capture(step, *batches[0])
    return captured, batches, one_device(captured, step, batches)


def assert_trains_as_one_device(optimizer: str, make_strategy) -> None:
    captured, batches, alone = on_one_device(optimizer)
    found = train(captured, make_strategy(captured.step), batches)
    for name, value in alone.variables[0].items():
        np.testing.assert_allclose(found.variable(name), value, rtol=1e-9, atol=1e-9, err_msg=name)


@pytest.mark.parametrize(
    "optimizer, owners", pairs(["momentum", "adamw", "rmsprop", "global norm", "clipped", "average"], OWNERS)
)
def test_updates_are_those_of_one_device(optimizer, owners):
    assert_trains_as_one_device(optimizer, lambda step: plan(step, 2, 1, OWNERS[owners], servers=1, staleness=2))


@pytest.mark.parametrize("owners, replicas", [({"table": 1}, 2), ({"kernel": 0, "gain": 1}, 1)])
def test_stale_and_synchronous_variables_stand_side_by_side(owners, replicas):
    assert_trains_as_one_device("adam", lambda step: plan(step, 2, replicas, owners, staleness=1))


def test_a_step_and_what_is_served_share_nothing_that_has_state():
    captured = capture(make_step(Choices("mean", "adam", True, False, True)), *make_batches(1, [2])[0])
    for item in rewritten(captured, plan(captured.step, 2, 1, {"table": 0, "kernel": 1, "gain": 1}, staleness=3)):
        editor = GraphEditor(item.graph_def)
        step = editor.ancestors([*map(node_of, item.outputs), *item.targets])
        shared = {editor[name].op for name in step & editor.ancestors(item.background_nodes)}
        assert item.background_nodes
        assert shared <= {"Const", "VarHandleOp"}


def test_a_step_waits_for_no_update():
    captured = capture(make_step(Choices("mean", "momentum", False, False, False)), *make_batches(1, [2])[0])
    step = rewritten(captured, plan(captured.step, 2, 1, dict.fromkeys(OWNED, 0), staleness=1))[0]
    editor, effects = GraphEditor(step.graph_def), Effects(step.graph_def)

    def written(names):
        return {step.by_handle[h].name for name in names for h in effects.of(editor[name]).writes} & set(OWNED)

    assert written(editor.ancestors(step.background_nodes)) == set(OWNED)
    assert not written(editor.ancestors([*map(node_of, step.outputs), *step.targets]))


def test_a_norm_over_stale_and_synchronous_gradients_is_refused():
    captured = capture(make_step(Choices("mean", "global norm", False, False, False)), *make_batches(1, [2])[0])
    strategy = plan(captured.step, 2, 1, {"table": 0, "kernel": 1}, staleness=1)
    with pytest.raises(StrategyError, match=r"kernel \(stale\) and gain \(synchronous\).*`staleness`"):
        rewrite(captured.step, Context(strategy, 0))


def test_returning_a_gradient_is_refused():
    kernel = tf.Variable(np.ones([3]), name="kernel")

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(x * kernel)
        gradient = tape.gradient(loss, kernel)
        kernel.assign_sub(gradient)
        return tf.norm(gradient)

    captured = capture(step, np.ones([2, 3]))
    strategy = plan(captured.step, 2, 1, {"kernel": 1}, staleness=1)
    with pytest.raises(StrategyError, match="returned by the step and computed from the gradient of kernel"):
        rewrite(captured.step, Context(strategy, 0))


def test_an_update_under_a_condition_that_counts_steps_is_refused():
    step = linear_step(keras.optimizers.Adam(0.01, gradient_accumulation_steps=2))
    captured = capture(step, *make_batches(1, [2])[0])
    strategy = plan(captured.step, 2, 1, OWNERS["one owner"], staleness=1)
    with pytest.raises(StrategyError, match=r"iteration is written by the step and read within .* \(If\)"):
        rewrite(captured.step, Context(strategy, 1))


def test_checks_of_gradients_are_made_where_these_are_whole():
    kernel = tf.Variable(np.ones([3]), name="kernel")

    def step(x: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(x * kernel)
        kernel.assign_sub(tf.debugging.check_numerics(tape.gradient(loss, kernel), "no number"))

    captured = capture(step, np.ones([2, 3]))
    for worker, item in enumerate(rewritten(captured, plan(captured.step, 2, 1, {"kernel": 1}, staleness=1))):
        editor = GraphEditor(item.graph_def)
        in_step, served = editor.ancestors(item.targets), editor.ancestors(item.background_nodes)
        assert not any(editor[name].op == "CheckNumerics" for name in in_step)
        assert any(editor[name].op == "CheckNumerics" for name in served) == (worker == 1)


def test_an_update_has_what_was_fed_to_its_own_step():
    kernel = tf.Variable(np.zeros([3]), name="kernel")
    count = tf.Variable(0.0, dtype=tf.float64, name="count", trainable=False)

    def step(x: tf.Tensor, rate: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.reduce_sum(x * kernel, 1))
        count.assign_add(1.0)
        kernel.assign_sub(rate * count * tape.gradient(loss, kernel))

    batches = [(np.full([4, 3], k + 1.0), np.float64(10.0**-k)) for k in range(4)]
    captured = capture(step, *batches[0])
    strategy = plan(captured.step, 2, 1, {"kernel": 2}, servers=1, staleness=1)
    found = train(captured, strategy, batches).variable("kernel")
    np.testing.assert_allclose(found, -sum(10.0**-k * (k + 1) ** 2 for k in range(4)) * np.ones(3), rtol=1e-12)
