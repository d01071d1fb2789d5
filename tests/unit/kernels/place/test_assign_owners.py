"""Ownership: the slots of a variable are placed with it."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from autodist.capture.gradients import recording_gradients
from autodist.kernels import find_holders
from autodist.placement.partitioning import Partitioning
from tests.unit.kernels.dense_steps import dense_step
from tests.unit.kernels.graphs_in_one_process import Cluster
from tests.unit.kernels.in_one_process import capture, plan
from tests.unit.kernels.place.partition.shards import numbers, sharded_plan

v1 = tf.compat.v1

pytestmark = pytest.mark.usefixtures("keras_in_float64")


@pytest.mark.parametrize("clip", [{}, {"global_clipnorm": 0.1}])
def test_a_slot_that_is_read_before_it_is_written_stands_with_its_variable(clip):
    """Lion's momentum is written from all gradients if these are clipped together, and belongs to one variable."""
    captured = capture(dense_step(keras.optimizers.Lion(0.01, **clip)), np.ones((4, 4)))
    holders = find_holders(captured.step, plan(captured.step, 2, 1, {"weight_4": 0, "weight_5": 1}))
    owners = {name.rpartition("/")[2]: holder.slices[0].owner for name, holder in holders.items()}
    assert owners["weight_4_momentum"] == owners["weight_4"] == 0
    assert owners["weight_5_momentum"] == owners["weight_5"] == 1
    assert owners["iteration"] == owners["learning_rate"] is None


@pytest.mark.parametrize(
    "planned",
    [lambda item: plan(item, 2, 1, {"w": 1}), lambda item: sharded_plan(item, {"w": Partitioning(0, (1, 3))}, 2)],
    ids=["owned", "cut"],
)
def test_slots_of_an_update_that_no_gradient_reaches_stand_with_its_variable(planned):
    """Runs add gradients up in a variable, and another run applies them: a session places each node by one of them."""
    with tf.Graph().as_default() as graph, recording_gradients(in_functions=False) as notes:
        x = v1.placeholder(tf.float64, [None, 4], "x")
        w = v1.get_variable("w", initializer=numbers(0, 4, 3), use_resource=True)
        loss = tf.reduce_sum(tf.square(x @ w))
        kept = v1.get_variable("kept", initializer=np.zeros((4, 3)), trainable=False, use_resource=True)
        runs = [
            kept.assign_add(tf.gradients(loss, w)[0], name="gather", read_value=False).name,
            v1.train.AdamOptimizer(0.05).apply_gradients([(kept, w)], name="train").name,
            kept.assign(tf.zeros_like(kept), name="forget", read_value=False).name,
        ]
        initial = v1.global_variables_initializer().name
        cluster = Cluster(graph, notes.calls, planned)
        with v1.Session(graph=graph) as alone, cluster.session:
            alone.run(initial)
            cluster.run(targets=[initial])
            for k in range(4):
                fed = {"x": numbers(k, 6, 4)}
                alone.run(runs[0], {"x:0": fed["x"]})
                cluster.run(targets=runs[:1], **fed)
                for name in runs[1:] if k % 2 else ():
                    alone.run(name)
                    cluster.run(targets=[name])
            reads = [f"{name}/Read/ReadVariableOp:0" for name in ("w", "w/Adam", "w/Adam_1", "kept")]
            expected = alone.run(reads)
            for found in cluster.run(reads):
                for one, other in zip(found, expected, strict=True):
                    np.testing.assert_allclose(one, other, rtol=1e-12)
    assert len({cluster.holders[name] for name in ("w", "w/Adam", "w/Adam_1")}) == 1
