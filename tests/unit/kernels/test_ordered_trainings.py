"""Parts of a step that only control dependencies order, without a data dependency between them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf

from autodist.capture.function import CapturedFunction
from autodist.proto import strategy_pb2
from tests.unit.kernels.in_one_process import assert_same, capture, one_device, plan, rewritten, train
from tests.unit.kernels.pairs import pairs
from tests.unit.kernels.place.partition.shards import numbers

Step = Callable[[tf.Tensor], object]


def _gradient(x: tf.Tensor, weight: tf.Variable) -> tf.Tensor:
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(tf.reduce_sum(x * weight, 1) - 1.0))
    return tape.gradient(loss, weight)


def _update(x: tf.Tensor, weight: tf.Variable) -> tf.Operation:
    return weight.assign_sub(0.1 * _gradient(x, weight), read_value=False)


def _mean(x: tf.Tensor, mean: tf.Variable) -> tf.Operation:
    return mean.assign_add(0.1 * (tf.reduce_mean(x, 0) - mean), read_value=False)


def _moved(x: tf.Tensor, weight: tf.Variable) -> tf.Operation:
    away = 0.05 * _gradient(x, weight)
    weight.assign_add(away)
    further = _gradient(x, weight)
    weight.assign_sub(away)
    return weight.assign_sub(0.1 * further, read_value=False)


Part = tuple[Callable[[tf.Tensor, tf.Variable], tf.Operation], str]

PROGRAMS: dict[str, tuple[Part, ...]] = {
    "two trainings": ((_update, "first"), (_update, "second")),
    "means around trainings": ((_mean, "before"), (_update, "first"), (_mean, "after"), (_update, "second")),
    "weights that move": ((_moved, "first"), (_update, "second"), (_mean, "after")),
}


def _make(name: str) -> tuple[CapturedFunction, Step]:
    trained = {"first", "second"}
    variables = {
        of: tf.Variable(numbers(k, 3), trainable=of in trained, name=of)
        for k, of in enumerate(dict.fromkeys(of for _, of in PROGRAMS[name]))
    }

    def step(x: tf.Tensor) -> tf.Tensor:
        last: list[tf.Operation] = []
        for part, of in PROGRAMS[name]:
            with tf.control_dependencies(last):
                last = [part(x, variables[of])]
        return tf.reduce_mean(x)

    return capture(step, np.ones((6, 3))), step


@pytest.mark.parametrize("name, owners", pairs(PROGRAMS, [None, {"first": 1, "second": 1}, {"first": 0, "second": 1}]))
def test_parts_in_a_row_equal_one_device(name: str, owners: dict[str, int] | None):
    captured, step = _make(name)
    batches = [(numbers(k, 6, 3),) for k in range(3)]
    assert_same(train(captured, plan(captured.step, 2, 1, owners), batches), one_device(captured, step, batches))


@pytest.mark.parametrize("name", ["means around trainings", "weights that move"])
def test_nccls_one_order_agrees_with_that_of_the_parts(name: str):
    captured, _ = _make(name)
    strategy = plan(captured.step, 2, 1)
    for node in strategy.nodes:
        node.all_reduce.spec = strategy_pb2.AllReduce.NCCL
    for step in rewritten(captured, strategy):
        assert len(step.graph_index.order) == len(step.graph_index.nodes)  # no cycle
