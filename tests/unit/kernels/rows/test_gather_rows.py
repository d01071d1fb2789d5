"""GatherRows: a gather from a read costs as much as its rows, not as the table."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from autodist.graph.step import CapturedStep
from autodist.kernels.base import Context
from autodist.kernels.rows.gather_rows import GatherRows
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


def ops(step):
    return [n.op for n in step.graph_def.node]


def applied(step):
    return GatherRows().apply(step, Context(plan(step), 0))


def test_a_step_without_tables_is_left_as_it_is():
    step = CapturedStep(from_text("v = VarHandleOp()\nr = ReadVariableOp(v)\nx = Neg(r)"))
    assert applied(step) is step


def test_a_gather_of_a_read_becomes_a_gather_in_the_variable():
    step = table_step(lambda table, ids: tf.gather(table.read_value(), ids))
    assert "ResourceGather" not in ops(step)
    found = applied(step)
    assert ops(found).count("GatherV2") == ops(step).count("GatherV2") - 1
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
    step = table_step(gather[1])
    assert "ResourceGather" not in ops(applied(step))


def test_reads_that_come_after_a_write_stay_after_it():
    text = "v = VarHandleOp()\na = Placeholder()\nw = AssignVariableOp(v, a)\nr = ReadVariableOp(v, ^w)\ns = Shape(r)"
    step = CapturedStep(from_text(text))
    assert "s = VariableShape(v, ^w)" in to_text(applied(step).graph_def)


def test_a_shape_that_only_waits_for_a_read_is_another_tensors():
    step = CapturedStep(from_text("v = VarHandleOp()\na = Placeholder()\nr = ReadVariableOp(v)\ns = Shape(a, ^r)"))
    assert "s = Shape(a, ^r)" in to_text(applied(step).graph_def)


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
    text = to_text(applied(CapturedStep(from_text(ROWS))).graph_def)
    assert "g = ResourceGather(v, ids)" in text
    assert "w = AssignAddVariableOp(v, a, ^g)" in text


def test_writes_wait_for_the_gather_where_their_value_came_from_the_read():
    step = CapturedStep(from_text(ROWS.replace("(v, a, ^r)", "(v, r)")))
    text = to_text(applied(step).graph_def)
    assert "w = AssignAddVariableOp(v, r, ^g)" in text


def test_a_read_whose_value_nobody_takes_goes():
    assert "ReadVariableOp" not in ops(applied(CapturedStep(from_text(ROWS))))


def test_a_read_that_the_step_returns_stays():
    assert "ReadVariableOp" in ops(applied(CapturedStep(from_text(ROWS), outputs=("r:0",))))


def test_rows_that_are_chosen_after_a_write_are_gathered_from_what_was_read_before():
    text = ROWS.replace("ids = Placeholder()", "late = ReadVariableOp(v, ^w)\n    ids = Neg(late)")
    assert "g = GatherV2(r, ids, axis)" in to_text(applied(CapturedStep(from_text(text))).graph_def)


def test_of_two_gathers_that_would_wait_for_each_other_one_stays():
    text = """
        axis = Const()
        a = Placeholder()
        v = VarHandleOp()
        u = VarHandleOp()
        rv = ReadVariableOp(v)
        ru = ReadVariableOp(u)
        wv = AssignAddVariableOp(v, a, ^rv)
        wu = AssignAddVariableOp(u, a, ^ru)
        lv = ReadVariableOp(v, ^wv)
        lu = ReadVariableOp(u, ^wu)
        iv = Neg(lv)
        iu = Neg(lu)
        gv = GatherV2(rv, iu, axis)
        gu = GatherV2(ru, iv, axis)
    """
    found = applied(CapturedStep(from_text(text)))
    assert ops(found).count("ResourceGather") == ops(found).count("GatherV2") == 1
    assert len(found.graph_index.order) == len(found.graph_def.node)  # no cycle
