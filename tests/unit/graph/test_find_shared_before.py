"""The order in which a step accesses the variables that belong to no pipeline stage."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from autodist.graph.find_shared_before import find_shared_before
from tests.unit.kernels.in_one_process import capture


def test_reads_come_after_the_write_before_them_and_before_the_one_after_and_in_no_order_among_each_other():
    state, kernel = tf.Variable([1.0, 2.0], name="state"), tf.Variable([1.0, 2.0], name="kernel")

    def step(x):
        with tf.GradientTape() as tape:
            first, second = x * state.read_value(), x + state.read_value()
            state.assign(tf.reduce_mean(first, 0))
            loss = tf.reduce_mean(first * second * state * kernel)
        kernel.assign_sub(tape.gradient(loss, kernel))
        return loss

    item = capture(step, np.ones((3, 2), np.float32)).step
    handles = {item.by_handle[handle].name: handle for handle in item.by_handle}
    before = find_shared_before(item, set(item.graph_index.order), [handles["kernel"]])
    (write,) = (name for name in before if item.graph_index.nodes[name].op == "AssignVariableOp")
    reads = set(before) - {write}
    assert len(reads) == 3
    assert len(before[write]) == 2
    assert [before[name] for name in reads - set(before[write])] == [[write]]
    assert all(not before[name] for name in before[write])
