"""GatherRows and SumRepeatedRows: a table costs what its rows cost, and repeated rows add up in one order."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from autodist.graph.item import GraphItem
from autodist.kernels.base import Context
from autodist.kernels.rows import GatherRows, SumRepeatedRows
from tests.unit.graph.graph_text import assert_imports, from_text, to_text
from tests.unit.kernels.in_one_process import capture, plan

IDS = np.zeros((4,), np.int32)


def table_step(gather):
    table = tf.Variable(np.arange(12.0).reshape(6, 2), name="table")

    def step(ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(gather(table, ids)))
        gradient = tf.IndexedSlices(*_rows(tape.gradient(loss, table), table))
        table.scatter_sub(tf.IndexedSlices(0.1 * gradient.values, gradient.indices))
        return loss

    return capture(step, IDS).item


def _rows(gradient, table):
    if isinstance(gradient, tf.IndexedSlices):
        return gradient.values, gradient.indices
    return gradient, tf.range(table.shape[0])


def ops(item):
    return [n.op for n in item.graph_def.node]


def applied(item, workers=1, replicas=1, kernel=GatherRows):
    return kernel().apply(item, Context(plan(item, workers, replicas), 0))


def test_a_step_without_tables_is_left_as_it_is():
    item = GraphItem(from_text("v = VarHandleOp()\nr = ReadVariableOp(v)\nx = Neg(r)"))
    assert applied(item) is item


def test_a_gather_of_a_read_becomes_a_gather_in_the_variable():
    item = table_step(lambda table, ids: tf.gather(table.read_value(), ids))
    assert "ResourceGather" not in ops(item)
    found = applied(item)
    assert ops(found).count("GatherV2") == ops(item).count("GatherV2") - 1
    assert "ResourceGather" in ops(found) and "ReadVariableOp" not in ops(found)
    assert_imports(found.graph_def)


@pytest.mark.parametrize(
    "gather",
    {
        "along the second axis": lambda table, ids: tf.gather(table.read_value(), tf.minimum(ids, 1), axis=1),
        "of a sum": lambda table, ids: tf.gather(table + 1.0, ids),
    }.items(),
    ids=lambda pair: pair[0],
)
def test_other_gathers_stay(gather):
    item = table_step(gather[1])
    assert "ResourceGather" not in ops(applied(item))


def test_reads_that_come_after_a_write_stay_after_it():
    text = "v = VarHandleOp()\na = Placeholder()\nw = AssignVariableOp(v, a)\nr = ReadVariableOp(v, ^w)\ns = Shape(r)"
    item = GraphItem(from_text(text))
    assert "s = VariableShape(v, ^w)" in to_text(applied(item).graph_def)


def test_a_shape_that_only_waits_for_a_read_is_another_tensors():
    item = GraphItem(from_text("v = VarHandleOp()\na = Placeholder()\nr = ReadVariableOp(v)\ns = Shape(a, ^r)"))
    assert "s = Shape(a, ^r)" in to_text(applied(item).graph_def)


ROWS = """
    axis = Const()
    ids = Placeholder()
    v = VarHandleOp()
    r = ReadVariableOp(v)
    g = GatherV2(r, ids, axis)
    a = Placeholder()
    w = AssignAddVariableOp(v, a, ^r)
"""


def test_writes_wait_for_the_gather_where_they_waited_for_the_read():
    """The sum added need not depend on the rows: the gradient of a mean of rows does not."""
    text = to_text(applied(GraphItem(from_text(ROWS))).graph_def)
    assert "g = ResourceGather(v, ids)" in text
    assert "w = AssignAddVariableOp(v, a, ^g)" in text


def test_writes_wait_for_the_gather_where_their_value_came_from_the_read():
    item = GraphItem(from_text(ROWS.replace("(v, a, ^r)", "(v, r)")))
    text = to_text(applied(item).graph_def)
    assert "w = AssignAddVariableOp(v, r, ^g)" in text


def test_a_read_whose_value_nobody_takes_goes():
    assert "ReadVariableOp" not in ops(applied(GraphItem(from_text(ROWS))))


def test_a_read_that_the_step_returns_stays():
    assert "ReadVariableOp" in ops(applied(GraphItem(from_text(ROWS), outputs=("r:0",))))


def test_rows_that_are_chosen_after_a_write_are_gathered_from_what_was_read_before():
    text = ROWS.replace("ids = Placeholder()", "late = ReadVariableOp(v, ^w)\n    ids = Neg(late)")
    assert "g = GatherV2(r, ids, axis)" in to_text(applied(GraphItem(from_text(text))).graph_def)


def test_one_device_scatters_as_the_script_says():
    item = table_step(tf.gather)
    assert applied(item, kernel=SumRepeatedRows) is item


def test_rows_are_summed_right_before_they_are_written():
    item = table_step(tf.gather)
    found = applied(item, replicas=2, kernel=SumRepeatedRows)
    assert ops(found).count("UnsortedSegmentSum") == 1
    assert_imports(found.graph_def)


def test_repeated_rows_sum_to_the_same_bits_every_time():
    """In a scatter of repeated rows, threads add in any order (40 results in 40 runs)."""
    rng = np.random.default_rng(0)
    ids, rows = rng.integers(0, 3, 20_000).astype(np.int32), rng.normal(size=(20_000, 8)).astype(np.float32)
    with tf.Graph().as_default() as graph:
        table = tf.Variable(tf.zeros((3, 8)), name="table", use_resource=True)
        indices = tf.compat.v1.placeholder(tf.int32, [None], name="ids")
        updates = tf.compat.v1.placeholder(tf.float32, [None, 8], name="rows")
        tf.raw_ops.ResourceScatterAdd(resource=table.handle, indices=indices, updates=updates, name="scatter")
    found = applied(GraphItem(graph.as_graph_def()), replicas=2, kernel=SumRepeatedRows)
    with tf.Graph().as_default() as summed:
        tf.import_graph_def(found.graph_def, name="")
    config = tf.compat.v1.ConfigProto(intra_op_parallelism_threads=4, inter_op_parallelism_threads=2)
    with tf.compat.v1.Session(graph=summed, config=config) as session:
        results = set()
        for _ in range(20):
            session.run("table/Assign")
            session.run("scatter", {"ids:0": ids, "rows:0": rows})
            results.add(session.run("table/Read/ReadVariableOp:0").tobytes())
    assert len(results) == 1
    exact = np.zeros((3, 8))
    np.add.at(exact, ids, rows.astype(np.float64))
    np.testing.assert_allclose(np.frombuffer(results.pop(), np.float32).reshape(3, 8), exact, atol=1e-2)
