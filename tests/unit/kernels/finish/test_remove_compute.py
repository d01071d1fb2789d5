"""Workers without replicas: they own variables, see the shared values, and compute nothing."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.unit.kernels.drawn_steps import Choices, make_batches, make_step, on_one_device
from tests.unit.kernels.in_one_process import assert_same, capture, one_device, plan, rewritten, train
from tests.unit.kernels.pairs import pairs

OWNERS = {
    "all-reduce": {},
    "one server": {"table": 2, "kernel": 2, "gain": 2},
    "two servers": {"table": 2, "kernel": 1, "gain": 3},
    "mixed": {"table": 2, "gain": 0},
}
COMPUTE = {"MatMul", "Tanh", "TanhGrad", "ResourceGather", "GatherV2"}


def choices(optimizer: str) -> Choices:
    return Choices("mean", optimizer, is_tied=True, is_frozen=True, counts_steps=True)


def steps(optimizer: str, sizes: list[int]):
    batches = make_batches(5, sizes)
    step = make_step(choices(optimizer))
    return step, capture(step, *batches[0]), batches


@pytest.mark.parametrize("optimizer, owners", pairs(["adam", "average", "global norm"], OWNERS))
def test_training_is_that_of_one_device(optimizer, owners):
    captured, batches, alone = on_one_device(choices(optimizer), 5, (5, 1, 4))
    strategy = plan(captured.step, 2, 1, OWNERS[owners], servers=2)
    assert_same(train(captured, strategy, batches), alone, rtol=1e-9)


def test_one_replica_may_have_all_its_variables_on_another_worker():
    step, captured, batches = steps("momentum", [3, 2])
    strategy = plan(captured.step, 1, 1, dict.fromkeys(("table", "kernel", "gain"), 1), servers=1)
    assert_same(train(captured, strategy, batches), one_device(captured, step, batches), rtol=1e-12)


def test_the_chief_may_be_one_of_them():
    step, captured, batches = steps("adam", [3, 2])
    strategy = plan(captured.step, 1, 1, {"table": 0, "kernel": 1}, servers=1)
    strategy.graph_config.replicas[0].worker = 1
    assert_same(train(captured, strategy, batches), one_device(captured, step, batches), rtol=1e-9)


@pytest.mark.parametrize("owners", OWNERS)
def test_nothing_is_computed_there(owners):
    captured, *_ = on_one_device(choices("adam"), 5, (5, 1, 4))
    with_replicas, *_, without = rewritten(captured, plan(captured.step, 2, 1, OWNERS[owners], servers=2))
    assert COMPUTE & {node.op for node in with_replicas.graph_def.node}
    assert not COMPUTE & {node.op for node in without.graph_def.node}


def test_state_is_combined_there_too():
    layer = keras.layers.BatchNormalization(dtype="float64", momentum=0.5)
    layer.build((None, 3))
    kernel = tf.Variable(np.ones([3, 2]), name="kernel")

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(layer(x, training=True) @ kernel)
        kernel.assign_sub(tape.gradient(loss, kernel))
        return loss

    batch = np.random.default_rng(1).normal(size=(4, 3))
    captured = capture(step, batch)
    alike = train(captured, plan(captured.step, 2, 1, {"kernel": 1}), [(batch,)])
    found = train(captured, plan(captured.step, 2, 1, {"kernel": 2}, servers=1), [(batch,)])
    for variable in captured.step.variables:
        np.testing.assert_array_equal(found.variable(variable.name), alike.variable(variable.name))


def test_outputs_of_replicas_are_empty_on_a_worker_without_replicas():
    kernel = tf.Variable(np.ones([3, 2]), name="kernel")

    def step(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as tape:
            rows = x @ kernel
            loss = tf.reduce_mean(tf.square(rows))
        kernel.assign_sub(tape.gradient(loss, kernel))
        return rows, loss

    batch = np.ones([4, 3])
    captured = capture(step, batch)
    trained = train(captured, plan(captured.step, 2, 1, {"kernel": 2}, servers=1), [(batch,)])
    first, second, (rows, loss) = trained.outputs[0]
    assert len(first[0]) == len(second[0]) == 2
    assert rows.shape == (0, 2)
    assert loss == first[1] == second[1]
