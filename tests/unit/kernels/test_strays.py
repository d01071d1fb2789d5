"""Unapplied gradients: their updates write another variable, of another network, or one that accumulates them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
import tensorflow as tf

from autodist.capture.function import CapturedFunction
from autodist.placement.partitioning import Partitioning
from tests.unit.kernels.in_one_process import Trained, assert_same, capture, one_device, plan, train
from tests.unit.kernels.pairs import pairs
from tests.unit.kernels.place.partition.shards import cut_in_strategy

BATCHES = [[np.random.default_rng(k).normal(size=(count, 3))] for k, count in enumerate((7, 6, 1))]

Step = Callable[[tf.Tensor], object]


def variables(owner: str) -> list[tf.Variable]:
    rng = np.random.default_rng(3)
    shapes = {"first": (3, 3), "second": (3, 3), "table": (5, 3)}
    return [tf.Variable(rng.normal(size=shape), name=f"{owner}/{name}") for name, shape in shapes.items()]


def loss_of(net: list[tf.Variable], x: tf.Tensor, reduce: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
    rows = tf.gather(net[2], tf.cast(tf.abs(x[:, 0]) * 2, tf.int32) % 5)
    return reduce(tf.square(tf.tanh(x @ net[0]) @ net[1] * rows))


def moves_another_network(takes_over: bool) -> Step:
    """As a worker of A3C: gradients by its own weights, clipped together, move shared ones, which it may then take."""
    local, shared = variables("local"), variables("shared")
    slots = [tf.Variable(tf.zeros_like(v), name=f"{v.name[:-2]}/momentum", trainable=False) for v in shared]

    def step(x):
        with tf.GradientTape() as tape:
            loss = loss_of(local, x, tf.reduce_mean)
        found = [tf.convert_to_tensor(g) for g in tape.gradient(loss, local)]
        clipped, norm = tf.clip_by_global_norm(found, 0.5)
        for gradient, slot, variable in zip(clipped, slots, shared, strict=True):
            slot.assign(0.9 * slot + gradient)
            variable.assign_sub(0.1 * slot)
        for own, other in zip(local, shared, strict=True) if takes_over else ():
            own.assign(other)
        return loss, norm

    return step


def gathers(reduce: Callable[[tf.Tensor], tf.Tensor]) -> Step:
    """Adds gradients up for a step to come."""
    net = variables("net")
    kept = [tf.Variable(tf.zeros_like(v), name=f"{v.name[:-2]}/kept", trainable=False) for v in net]

    def step(x):
        with tf.GradientTape() as tape:
            loss = loss_of(net, x, reduce)
        for slot, gradient in zip(kept, tape.gradient(loss, net), strict=True):
            slot.assign_add(tf.convert_to_tensor(gradient))
        return loss

    return step


STEPS = {
    "another network": lambda: moves_another_network(False),
    "another network, taken over": lambda: moves_another_network(True),
    "mean": lambda: gathers(tf.reduce_mean),
    "sum": lambda: gathers(tf.reduce_sum),
}
OF = {"another network": "shared", "another network, taken over": "local", "mean": "net", "sum": "net"}
"""The owner of the variables that the gradients are attributed to."""

LAYOUTS = {
    "2 replicas": ((1, 2), []),
    "2 workers, all owned": ((2, 1), ["first", "second", "table"]),
    "2 workers of 2": ((2, 2), []),
    "2 workers of 2, all owned": ((2, 2), ["first", "second", "table"]),
    "2 workers of 2, some owned": ((2, 2), ["first", "table"]),
}


@cache
def on_one_device(name: str) -> tuple[CapturedFunction, Trained]:
    step = STEPS[name]()
    captured = capture(step, *BATCHES[0])
    return captured, one_device(captured, step, BATCHES)


@pytest.mark.feature("function", "optimizer: gradients applied to another network (A3C)")
@pytest.mark.parametrize("name, layout", pairs(STEPS, LAYOUTS))
def test_many_replicas_write_what_one_device_does(name, layout):
    cluster, owners = LAYOUTS[layout]
    captured, alone = on_one_device(name)
    trained = {f"{OF[name]}/{one}" for one in ("first", "second", "table")}
    assert {g.variable for g in captured.step.gradients} == trained
    strategy = plan(captured.step, *cluster, {f"{OF[name]}/{one}": k % 2 for k, one in enumerate(owners)})
    assert_same(train(captured, strategy, BATCHES), alone)


@pytest.mark.parametrize("name", ["another network, taken over", "mean"])
def test_so_do_shards(name):
    captured, alone = on_one_device(name)
    strategy = plan(captured.step, 2, 1)
    cut_in_strategy(strategy, f"{OF[name]}/table", Partitioning(0, (2, 3)), [0, 1])
    assert_same(train(captured, strategy, BATCHES), alone)
