"""Branches and loops that write a divided variable through whole copies: each sees the writes of those before it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf

from autodist.graph.names import node_of
from autodist.kernels import Context, rewrite
from tests.unit.kernels.in_one_process import capture, on_mesh
from tests.unit.kernels.shard.equal_on_mesh import UNTIL_DIVIDED, assert_equal_on_mesh
from tests.unit.kernels.shard.mesh_models import Model

Write = Callable[[tf.Variable, tf.Tensor], object]


def in_branch(v: tf.Variable, x: tf.Tensor) -> None:
    tf.cond(tf.reduce_sum(x) > -1e9, lambda: v.assign(v * 2.0 + tf.reduce_mean(x)), lambda: v.assign_add(v))


def in_loop(v: tf.Variable, x: tf.Tensor) -> None:
    def turn(k: tf.Tensor) -> tf.Tensor:
        v.assign(tf.sin(v) + tf.reduce_mean(x))
        return k + 1

    tf.while_loop(lambda k: k < 3, lambda k: (turn(k),), (0,))


def elements(v: tf.Variable, x: tf.Tensor) -> None:
    """Reads single elements, by a gather of the whole value."""
    picked = tf.raw_ops.ResourceGatherNd(resource=v.handle, indices=[[0, 3], [1, 0]], dtype=v.dtype)
    v.assign_add(tf.ones_like(v) * tf.reduce_sum(picked) * tf.reduce_mean(x))


def writing(*writes: Write) -> Model:
    rng = np.random.default_rng(0)
    v = tf.Variable(rng.normal(size=(4, 4)), name="v")

    def step(x: tf.Tensor) -> tuple[tf.Tensor, ...]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.reduce_sum((x @ v) ** 2, 1))
        v.assign_sub(0.01 * tape.gradient(loss, v))
        for write in writes:
            write(v, x)
        return loss, tf.reduce_sum(v**2)

    batches = [(rng.normal(size=(n, 4)),) for n in (4, 3)]
    return Model(step, capture(step, *batches[0]), batches)


@pytest.mark.parametrize(
    "writes",
    [(in_branch, in_branch), (in_loop, in_loop), (in_branch, in_loop, in_branch), (in_loop, elements, in_branch)],
    ids=lambda writes: " then ".join(write.__name__ for write in writes),
)
def test_each_sees_the_writes_of_those_before_it(writes: tuple[Write, ...]) -> None:
    assert_equal_on_mesh(writing(*writes), {"model": 2}, {"v": "[model, –]"})


@pytest.mark.parametrize("write", [in_branch, in_loop])
def test_a_later_copy_is_refreshed_after_the_write_of_an_earlier_one(write: Write) -> None:
    captured = writing(write, write, write).captured
    strategy = on_mesh(captured.step, {"model": 2}, {"v": "[–, model]"})
    step = rewrite(captured.step, Context(strategy, 0), kernels=UNTIL_DIVIDED)
    index, handle = step.graph_index, captured.step.variables[0].handle
    first, second, third = (name.rpartition("/")[2] for name in index.order if f"{handle}/whole/for/" in name)
    before = {name: {node_of(i) for i in index.nodes[f"{handle}/whole/for/{name}"].input} for name in (second, third)}
    assert f"{handle}/whole/from/{first}" in before[second] and f"{handle}/whole/from/{second}" in before[third]
