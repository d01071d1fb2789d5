"""AddRowsInOrder: repeated rows are added to the same bits in every run."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from autodist.graph.step import CapturedStep
from autodist.kernels.context import Context
from autodist.kernels.rows.add_rows_in_order import AddRowsInOrder
from tests.unit.kernels.in_one_process import plan
from tests.unit.kernels.rewrites import assert_rewrites, cases


def applied(step):
    return AddRowsInOrder().apply(step, Context(plan(step, 1, 2), 0))


CASES = {
    "a step without scatters stays": """
      v = VarHandleOp()
      a = Placeholder()
      w = AssignSubVariableOp(v, a)
      run w
    """,
    "rows are added one after the other": """
        table = VarHandleOp(shape=[6, 2])
        ids = Placeholder(dtype=int32, shape=[None])
        rows = Placeholder(shape=[None, 2])
      - w = ResourceScatterSub(table, ids, rows)
      + w = ResourceScatterNdSub(table, autodist/add_rows_in_order/w/ExpandDims, rows)
      + autodist/add_rows_in_order/w/ExpandDims/dim = -1
      + autodist/add_rows_in_order/w/ExpandDims = ExpandDims(ids, autodist/add_rows_in_order/w/ExpandDims/dim)
        run w
    """,
    "rows that cannot repeat are scattered as they are": """
      table = VarHandleOp(shape=[3, 2])
      all = Placeholder(dtype=int32, shape=[None])
      ids = Unique(all)
      rows = Placeholder(shape=[None, 2])
      w = ResourceScatterAdd(table, ids, rows)
      run w
    """,
}


@cases(CASES)
def test_rewrites(text):
    assert_rewrites(AddRowsInOrder(), text, replicas=2)


def test_one_device_scatters_as_the_script_does():
    assert_rewrites(
        AddRowsInOrder(),
        """
        table = VarHandleOp(shape=[6, 2])
        ids = Placeholder(dtype=int32, shape=[None])
        rows = Placeholder(shape=[None, 2])
        w = ResourceScatterSub(table, ids, rows)
        run w
        """,
    )


def test_indices_of_any_rank_are_served():
    with tf.Graph().as_default() as graph:
        table = tf.Variable(tf.zeros((3, 2)), name="table", use_resource=True)
        tf.raw_ops.ResourceScatterSub(
            resource=table.handle, indices=[[0, 2], [2, 2]], updates=tf.ones((2, 2, 2)), name="scatter"
        )
    assert run(applied(CapturedStep(graph.as_graph_def())), {}, times=1)[0].tolist() == [[-1, -1], [0, 0], [-3, -3]]


def test_no_rows_at_all_are_no_rows():
    with tf.Graph().as_default() as graph:
        table = tf.Variable(tf.ones((3, 2)), name="table", use_resource=True)
        ids = tf.compat.v1.placeholder(tf.int32, [None], name="ids")
        rows = tf.zeros((tf.size(ids), 2))
        tf.raw_ops.ResourceScatterSub(resource=table.handle, indices=ids, updates=rows, name="scatter")
    found = run(applied(CapturedStep(graph.as_graph_def())), {"ids:0": np.zeros((0,), np.int32)}, times=1)
    assert found[0].tolist() == [[1, 1]] * 3


def test_repeated_rows_add_up_to_the_same_bits_every_time():
    """In a plain scatter of repeated rows, threads add in any order (40 results in 40 runs)."""
    rng = np.random.default_rng(0)
    ids, rows = rng.integers(0, 3, 20_000).astype(np.int32), rng.normal(size=(20_000, 8)).astype(np.float32)
    with tf.Graph().as_default() as graph:
        table = tf.Variable(tf.zeros((3, 8)), name="table", use_resource=True)
        indices = tf.compat.v1.placeholder(tf.int32, [None], name="ids")
        updates = tf.compat.v1.placeholder(tf.float32, [None, 8], name="rows")
        tf.raw_ops.ResourceScatterAdd(resource=table.handle, indices=indices, updates=updates, name="scatter")
    results = run(applied(CapturedStep(graph.as_graph_def())), {"ids:0": ids, "rows:0": rows}, times=40)
    assert len({result.tobytes() for result in results}) == 1
    exact = np.zeros((3, 8))
    np.add.at(exact, ids, rows.astype(np.float64))
    np.testing.assert_allclose(results[0], exact, atol=1e-2)


def run(step, feeds, times):
    """The table after each of `times` runs of the node "scatter" on the table's first values."""
    with tf.Graph().as_default() as graph:
        tf.import_graph_def(step.graph_def, name="")
    config = tf.compat.v1.ConfigProto(intra_op_parallelism_threads=4, inter_op_parallelism_threads=2)
    results = []
    with tf.compat.v1.Session(graph=graph, config=config) as session:
        for _ in range(times):
            session.run("table/Assign")
            session.run("scatter", feeds)
            results.append(session.run("table/Read/ReadVariableOp:0"))
    return results
