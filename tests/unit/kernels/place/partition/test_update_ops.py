"""Ops that update a variable and its slots together, on shards: TensorFlow 1 optimizers, and raw ops."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf

from autodist.placement.partitioning import Partitioning
from tests.unit.kernels.in_one_process import capture
from tests.unit.kernels.pairs import pairs
from tests.unit.kernels.place.partition.shards import assert_trains_alike, numbers, partitioned, sharded_plan

raw = tf.raw_ops
ROWS, WIDTH = 7, 4
CUTS = {"rows": Partitioning(0, (3, 1, 3)), "columns": Partitioning(1, (1, 3))}

Apply = Callable[..., object]


def _numbers(**values: float) -> dict[str, tf.Tensor]:
    return {name: tf.constant(value, tf.float64) for name, value in values.items()}


RATE = {"lr": 0.1}
ADAM = {"lr": 0.1, "beta1_power": 0.9, "beta2_power": 0.99, "beta1": 0.9, "beta2": 0.99, "epsilon": 1e-3}
FTRL = {"lr": 0.1, "l1": 0.01, "l2": 0.01, "lr_power": -0.5}
RMSPROP = {"lr": 0.1, "rho": 0.9, "momentum": 0.5, "epsilon": 1e-3}
MOMENTUM = {"lr": 0.1, "momentum": 0.9}

DENSE: dict[str, Apply] = {
    "descent": lambda v, m, s, g: raw.ResourceApplyGradientDescent(var=v, delta=g, **_numbers(alpha=0.1)),
    "momentum": lambda v, m, s, g: raw.ResourceApplyMomentum(var=v, accum=m, grad=g, **_numbers(**MOMENTUM)),
    "keras momentum": lambda v, m, s, g: raw.ResourceApplyKerasMomentum(var=v, accum=m, grad=g, **_numbers(**MOMENTUM)),
    "adam": lambda v, m, s, g: raw.ResourceApplyAdam(var=v, m=m, v=s, grad=g, **_numbers(**ADAM)),
    "adagrad": lambda v, m, s, g: raw.ResourceApplyAdagrad(var=v, accum=m, grad=g, **_numbers(**RATE)),
    "rmsprop": lambda v, m, s, g: raw.ResourceApplyRMSProp(var=v, ms=m, mom=s, grad=g, **_numbers(**RMSPROP)),
    "ftrl": lambda v, m, s, g: raw.ResourceApplyFtrl(var=v, accum=m, linear=s, grad=g, **_numbers(**FTRL)),
}


def _sparse_adam(v, m, s, g, i):
    """As `tf.compat.v1.train.AdamOptimizer` does it: scatters into decayed slots."""
    raw.AssignVariableOp(resource=m, value=0.9 * raw.ReadVariableOp(resource=m, dtype=tf.float64))
    raw.ResourceScatterAdd(resource=m, indices=i, updates=0.1 * g)
    raw.AssignVariableOp(resource=s, value=0.99 * raw.ReadVariableOp(resource=s, dtype=tf.float64))
    raw.ResourceScatterAdd(resource=s, indices=i, updates=0.01 * g * g)
    mean, square = (raw.ReadVariableOp(resource=r, dtype=tf.float64) for r in (m, s))
    raw.AssignSubVariableOp(resource=v, value=0.1 * mean / (tf.sqrt(square) + 1e-3))


def _mul(v, m, s, g, i):
    raw.ResourceScatterMul(resource=v, indices=i, updates=tf.tanh(tf.reduce_sum(g)))


SPARSE: dict[str, Apply] = {
    "adagrad": lambda v, m, s, g, i: raw.ResourceSparseApplyAdagrad(
        var=v, accum=m, grad=g, indices=i, **_numbers(**RATE)
    ),
    "momentum": lambda v, m, s, g, i: raw.ResourceSparseApplyMomentum(
        var=v, accum=m, grad=g, indices=i, **_numbers(**MOMENTUM)
    ),
    "ftrl": lambda v, m, s, g, i: raw.ResourceSparseApplyFtrl(
        var=v, accum=m, linear=s, grad=g, indices=i, **_numbers(**FTRL)
    ),
    "adam": _sparse_adam,
    "update": lambda v, m, s, g, i: raw.ResourceScatterUpdate(resource=v, indices=i, updates=-g),
    "elements": lambda v, m, s, g, i: raw.ResourceScatterNdSub(ref=v, indices=i[:, None], updates=g),
    "scalar": _mul,
}


def _variables() -> list[tf.Variable]:
    return [
        tf.Variable(numbers(0, ROWS, WIDTH), name="v"),
        tf.Variable(np.full([ROWS, WIDTH], 0.1), trainable=False, name="m"),
        tf.Variable(np.full([ROWS, WIDTH], 0.1), trainable=False, name="s"),
    ]


@pytest.mark.parametrize("name, along", pairs(DENSE, CUTS))
def test_a_dense_update_is_done_shard_by_shard(name, along):
    variables = _variables()

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.tanh(x @ variables[0])))
        DENSE[name](*(v.handle for v in variables), tape.gradient(loss, variables[0]))
        return loss

    batches = [(numbers(k, 4, ROWS),) for k in range(3)]
    captured = capture(step, *batches[0])
    strategy = sharded_plan(captured.step, {"v": CUTS[along]})
    assert partitioned(captured.step, strategy)[1] == ()
    found = assert_trains_alike(captured, step, strategy, batches)
    assert set(found.partitionings) >= {"v"}


def _unique(gradient: tf.IndexedSlices) -> tuple[tf.Tensor, tf.Tensor]:
    ids, places = tf.unique(gradient.indices)
    return tf.math.unsorted_segment_sum(gradient.values, places, tf.size(ids)), ids


@pytest.mark.parametrize("name, way", pairs(SPARSE, [(True, "rows"), (False, "columns"), (False, "rows")]))
def test_a_sparse_update_writes_the_rows_of_each_shard(name, way):
    is_unique, along = way
    if name == "update":
        is_unique = True  # duplicates have no defined winner on one device either
    variables = _variables()

    def step(ids: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.tanh(tf.gather(variables[0], ids))))
        gradient = tape.gradient(loss, variables[0])
        rows = _unique(gradient) if is_unique else (gradient.values, gradient.indices)
        SPARSE[name](*(v.handle for v in variables), *rows)
        return loss

    batches = [(np.random.default_rng(k).integers(0, ROWS, (6, 2)).astype(np.int32),) for k in range(3)]
    captured = capture(step, *batches[0])
    assert_trains_alike(captured, step, sharded_plan(captured.step, {"v": CUTS[along]}), batches)


def test_a_slot_that_serves_another_variable_too_leaves_both_right():
    v, m, _ = _variables()
    other = tf.Variable(numbers(1, ROWS, WIDTH), name="other")

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.tanh(x @ v) + x @ other))
        for one, gradient in zip((v, other), tape.gradient(loss, (v, other)), strict=True):
            raw.ResourceApplyMomentum(var=one.handle, accum=m.handle, grad=gradient, **_numbers(**MOMENTUM))
        return loss

    batches = [(numbers(k, 4, ROWS),) for k in range(3)]
    captured = capture(step, *batches[0])
    strategy = sharded_plan(captured.step, {"v": Partitioning(0, (3, 4))}, by_server=False)
    _, told = partitioned(captured.step, strategy)
    assert any("ResourceApplyMomentum" in line for line in told)
    assert_trains_alike(captured, step, strategy, batches)
