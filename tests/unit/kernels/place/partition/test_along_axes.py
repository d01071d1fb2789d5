"""Runs that only set variables store the slices of those that a mesh divides along several axes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tensorflow as tf

from autodist.capture.graph_mode import CapturedGraph
from autodist.graph.step import PlacedStep
from autodist.kernels import Context
from autodist.kernels.place.partition import PartitionVariables
from autodist.placement.group import Group
from autodist.placement.holder import Holder, Slice
from tests.unit.kernels.in_one_process import plan

v1 = tf.compat.v1

VALUE = np.arange(30.0).reshape(5, 6)


def in_columns_of_uneven_rows() -> Holder:
    """Columns over a mesh's axis for models, and uneven rows over the axis of the batch, as `HoldOnMesh` names them."""
    return Holder(
        tuple(
            Slice(f"/shard_{row}/shard_{column}", (3 * row, 3 * column), (3 - row, 3), Group.of_workers([row]))
            for row in range(2)
            for column in range(2)
        )
    )


def in_uneven_rows_of_rows() -> Holder:
    """Rows over two axes, whose lengths along the second one differ."""
    bounds = {"/shard_0/shard_0": (0, 2), "/shard_1/shard_0": (2, 1), "/shard_0/shard_1": (3, 2)}
    return Holder(
        tuple(Slice(name, (start, 0), (size, 6), Group.of_workers([0])) for name, (start, size) in bounds.items())
    )


@pytest.mark.parametrize(
    "holder",
    [
        Holder.divided((5, 6), (1, 3), [Group.of_workers([k]) for k in range(3)]),
        Holder.divided((5, 6), (5, 2), [Group.of_workers([k % 2]) for k in range(10)]),
        in_columns_of_uneven_rows(),
        in_uneven_rows_of_rows(),
    ],
)
def test_an_initializer_sets_each_slice_under_its_name(holder: Holder) -> None:
    with tf.Graph().as_default() as graph:
        v = v1.get_variable("v", initializer=VALUE, use_resource=True)
        whole = v1.get_variable("whole", initializer=VALUE, use_resource=True)
        with tf.control_dependencies([v.initializer]):
            double = whole.assign(2 * v.read_value(), read_value=False)
        captured = CapturedGraph.of(graph, []).step([], [double.name], {})
    placed = PlacedStep.of(captured, holders={"v": holder})
    step = PartitionVariables().apply(placed, Context(plan(captured), 0))
    assert [(one.begin, one.shape, one.group) for one in step.holders["v"].slices] == [
        (one.begin, one.shape, one.group) for one in sorted(holder.slices, key=lambda one: one.begin)
    ]
    assert {*step.slices} <= {variable.name for variable in step.variables}
    with tf.Graph().as_default(), v1.Session() as session:
        tf.import_graph_def(step.graph_def, name="")
        session.run(list(step.targets))

        def read(shared_name: str, shape: tuple[int, ...]) -> np.ndarray:
            handle = tf.raw_ops.VarHandleOp(dtype=tf.float64, shape=shape, shared_name=shared_name)
            return session.run(tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float64))

        for one in holder.slices:
            np.testing.assert_array_equal(read(f"v{one.name}", one.shape), VALUE[one.place], err_msg=one.name)
        np.testing.assert_array_equal(read("whole", VALUE.shape), 2 * VALUE)


def test_other_holders_stay_as_they_are() -> None:
    with tf.Graph().as_default() as graph:
        v1.get_variable("v", initializer=VALUE, use_resource=True)
        captured = CapturedGraph.of(graph, []).step([], ["v/Assign"], {})
    placed = PlacedStep.of(captured, holders={"v": Holder.whole(VALUE.shape, Group.of_workers([1]))})
    assert PartitionVariables().apply(placed, Context(plan(captured), 0)) is placed
    assert replace(placed, holders={}).holders == {}
