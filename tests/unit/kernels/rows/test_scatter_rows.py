"""ScatterRows and SumRows: a table with few nonzero rows is neither added to a variable nor summed."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from autodist.graph.step import CapturedStep
from autodist.kernels.context import Context
from autodist.kernels.rows.scatter_rows import ScatterRows
from autodist.kernels.rows.sum_rows import SumRows
from tests.unit.graph.graph_text import assert_imports, from_text
from tests.unit.kernels.in_one_process import plan
from tests.unit.kernels.table_steps import nodes_with_rows

ROWS = 7
IDS, VALUES = np.array([3, 0, 3, 5], np.int32), np.random.default_rng(0).normal(size=(4, 2))


def item_of(build, write="assign_sub"):
    """Returns a step that writes `build(table, squares)`, for a segment sum and an accumulator's value."""
    with tf.Graph().as_default() as graph:
        v = tf.Variable(tf.ones((ROWS, 2), tf.float64), name="v", use_resource=True)
        squares = tf.Variable(tf.ones((ROWS, 2), tf.float64), name="squares", use_resource=True)
        ids = tf.compat.v1.placeholder(tf.int32, [None], name="ids")
        rows = tf.compat.v1.placeholder(tf.float64, [None, 2], name="rows")
        added = tf.raw_ops.AssignAddVariableOp(
            resource=squares.handle, value=tf.square(tf.fill([ROWS, 2], tf.reduce_mean(rows)))
        )
        with tf.control_dependencies([added]):
            read = tf.raw_ops.ReadVariableOp(resource=squares.handle, dtype=tf.float64)
        value = build(tf.math.unsorted_segment_sum(rows, ids, ROWS), read)
        op = {"assign_add": tf.raw_ops.AssignAddVariableOp, "assign_sub": tf.raw_ops.AssignSubVariableOp}[write]
        op(resource=v.handle, value=value, name="write")
    definition = graph.as_graph_def()

    def spec_of(name):
        found = graph.get_tensor_by_name(name)
        return tf.TensorSpec(found.shape, found.dtype)

    return CapturedStep(definition, targets=("write",), noted=spec_of)


def applied(step, kernel=ScatterRows):
    return kernel().apply(step, Context(plan(step), 0))


def ops(step):
    return [node.op for node in step.graph_def.node]


def run(step):
    with tf.Graph().as_default() as graph:
        tf.import_graph_def(step.graph_def, name="")
    with tf.compat.v1.Session(graph=graph) as session:
        session.run(["v/Assign", "squares/Assign"])
        session.run("write", {"ids:0": IDS, "rows:0": VALUES})
        return session.run("v/Read/ReadVariableOp:0")


def test_a_step_without_sums_of_segments_is_left_as_it_is():
    step = CapturedStep(from_text("v = VarHandleOp()\na = Placeholder()\nw = AssignAddVariableOp(v, a)"))
    assert applied(step) is step and applied(step, SumRows) is step


@pytest.mark.parametrize("write", ["assign_add", "assign_sub"])
@pytest.mark.parametrize(
    "build",
    {
        "the sum": lambda table, squares: table,
        "scaled": lambda table, squares: table * tf.constant(0.1, tf.float64),
        "scaled along a row": lambda table, squares: table * tf.constant([0.1, 0.2], tf.float64) / 3.0,
        "clipped": lambda table, squares: tf.minimum(tf.maximum(table, -0.1), 0.1),
        "squared": lambda table, squares: tf.square(table) - table,
        "times a table": lambda table, squares: squares * table,
        "divided by a root": lambda table, squares: table / tf.sqrt(squares + 1e-7),
        "two sums by the same rows": lambda table, squares: table * 0.1 + tf.sqrt(tf.square(table)),
    }.items(),
    ids=lambda pair: pair[0],
)
def test_rows_are_added(build, write):
    step = item_of(build[1], write)
    found = applied(step)
    assert ("ResourceScatterAdd" if write == "assign_add" else "ResourceScatterSub") in ops(found)
    summed = [n for n in nodes_with_rows(found, ROWS) if n.startswith("UnsortedSegmentSum")]
    assert not summed
    np.testing.assert_allclose(run(found), run(step), rtol=1e-12)
    assert_imports(found.graph_def)


@pytest.mark.parametrize(
    "build",
    {
        "a sum with a table": lambda table, squares: table + squares,
        "not zero of zero": lambda table, squares: tf.exp(table),
        "shifted": lambda table, squares: table + 1.0,
        "a maximum above zero": lambda table, squares: tf.maximum(table, 0.5),
        "a quotient by it": lambda table, squares: squares / table,
        "divided by what may be zero": lambda table, squares: table / (squares - 1.0),
        "arithmetic along the rows": lambda table, squares: tf.cumsum(table),
    }.items(),
    ids=lambda pair: pair[0],
)
def test_a_table_that_may_be_nonzero_elsewhere_is_added_as_a_whole(build):
    step = item_of(build[1])
    assert applied(step) is step


def test_a_sum_that_others_read_stays_for_them():
    step = item_of(lambda table, squares: table * tf.reduce_max(table))
    found = applied(step)
    assert "ResourceScatterSub" in ops(found)
    assert [n for n in nodes_with_rows(found, ROWS) if n.startswith("UnsortedSegmentSum")]
    np.testing.assert_allclose(run(found), run(step), rtol=1e-12)


def test_shapes_of_new_tensors_are_known():
    found = applied(item_of(lambda table, squares: table * 0.5))
    scatter = next(n for n in found.graph_def.node if n.op == "ResourceScatterSub")
    name = scatter.input[2] if ":" in scatter.input[2] else f"{scatter.input[2]}:0"
    assert found.spec_of(name) == tf.TensorSpec((None, 2), tf.float64)


def test_a_norm_of_the_rows_is_taken_of_the_rows():
    step = item_of(lambda table, squares: squares * tf.reduce_sum(table))
    found = applied(step, SumRows)
    assert "UnsortedSegmentSum" not in ops(found)
    np.testing.assert_allclose(run(found), run(step), rtol=1e-12)


@pytest.mark.parametrize("axis", [0, 1])
def test_sums_along_one_axis_stay(axis):
    step = item_of(lambda table, squares: squares + tf.reduce_sum(tf.reduce_sum(table, axis)))
    assert applied(step, SumRows) is step
