"""GatherBeforeArithmetic: gather(f(table)) → f(gather(table))."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from autodist.graph.step import CapturedStep
from autodist.kernels.context import Context
from autodist.kernels.rows.gather_before_arithmetic import GatherBeforeArithmetic
from autodist.kernels.rows.gather_rows import GatherRows
from tests.unit.graph.graph_text import assert_imports
from tests.unit.kernels.in_one_process import plan
from tests.unit.kernels.rewrites import assert_rewrites
from tests.unit.kernels.table_steps import nodes_with_rows

ROWS = 7


def item_of(build, ids_shape=(None,)):
    """Returns a step that returns `build(table, other, ids)`, for the values of two variables and ids."""
    with tf.Graph().as_default() as graph:
        rng = np.random.default_rng(0)
        table, other = (
            tf.Variable(rng.uniform(0.5, 2.0, (ROWS, 3)), name=name, use_resource=True) for name in ("table", "other")
        )
        ids = tf.compat.v1.placeholder(tf.int32, ids_shape, name="ids")
        values = [tf.raw_ops.ReadVariableOp(resource=v.handle, dtype=v.dtype) for v in (table, other)]
        out = build(*values, ids)

    def spec_of(name):
        found = graph.get_tensor_by_name(name)
        return tf.TensorSpec(found.shape, found.dtype)

    return CapturedStep(graph.as_graph_def(), outputs=(out.name,), noted=spec_of)


def applied(step):
    context = Context(plan(step), 0)
    return GatherRows().apply(GatherBeforeArithmetic().apply(step, context), context)


def run(step, ids):
    with tf.Graph().as_default() as graph:
        tf.import_graph_def(step.graph_def, name="")
    with tf.compat.v1.Session(graph=graph) as session:
        session.run(["table/Assign", "other/Assign"])
        return session.run(step.outputs[0], {"ids:0": ids})


def needed(step):
    """Returns the step without unused nodes."""
    with tf.Graph().as_default() as graph:
        tf.import_graph_def(step.graph_def, name="")
    kept = tf.compat.v1.graph_util.extract_sub_graph(graph.as_graph_def(), [step.outputs[0].partition(":")[0]])
    return step.with_graph(kept)


def assert_rows_only(step, ids):
    found = applied(step)
    assert nodes_with_rows(needed(step), ROWS) and not nodes_with_rows(needed(found), ROWS)
    np.testing.assert_allclose(run(found, ids), run(step, ids), rtol=1e-12)
    return found


def assert_stays(step):
    assert GatherBeforeArithmetic().apply(step, Context(plan(step), 0)) is step


def test_a_gather_of_a_read_is_left_for_another_kernel():
    assert_stays(item_of(lambda table, other, ids: tf.gather(tf.identity(table), ids)))


def test_a_gather_moves_before_the_arithmetic_and_its_name_stays():
    found = assert_rewrites(
        GatherBeforeArithmetic(),
        """
            v = VarHandleOp(shape=[4, 2])
            ids = Placeholder(dtype=int32, shape=[None])
            axis = 0
            r = ReadVariableOp(v)
          - x = Sqrt(r)
          - g = GatherV2(x, ids, axis)
          + autodist/rows/g/of/r = GatherV2(r, ids, axis)
          + g = Sqrt(autodist/rows/g/of/r)
            y = Neg(g)
            return y:0
        """,
    )
    assert found.spec_of("autodist/rows/g/of/r:0") == tf.TensorSpec((None, 2))


def test_a_step_without_gathers_stays():
    assert_rewrites(GatherBeforeArithmetic(), "v = VarHandleOp()\nr = ReadVariableOp(v)\nx = Neg(r)")


@pytest.mark.parametrize(
    "build",
    {
        "root": lambda t, o, i: tf.gather(tf.sqrt(t + 1e-7), i),
        "cast": lambda t, o, i: tf.gather(tf.cast(t, tf.float32), i),
        "stopped gradient": lambda t, o, i: tf.gather(tf.stop_gradient(t), i),
        "a row for all": lambda t, o, i: tf.gather(t * tf.constant([1.0, 2.0, 3.0], tf.float64), i),
        "a table of one row": lambda t, o, i: tf.gather(t * tf.constant([[1.0, 2.0, 3.0]], tf.float64), i),
        "two tables": lambda t, o, i: tf.gather(t / tf.sqrt(o), i),
        "one table twice": lambda t, o, i: tf.gather(t * t - t, i),
    }.items(),
    ids=lambda pair: pair[0],
)
def test_arithmetic_is_done_on_rows(build):
    assert_rows_only(item_of(build[1]), [3, 0, 3])


def test_the_gradient_s_shape_is_asked_of_the_variable():
    def build(table, other, ids):
        scaled = table * 2.0
        return tf.gather(scaled, ids) + tf.cast(tf.raw_ops.Shape(input=scaled)[0], tf.float64)

    found = assert_rows_only(item_of(build), [1, 1])
    assert "VariableShape" in [node.op for node in found.graph_def.node]


@pytest.mark.parametrize("ids_shape", [(), (2, 2)])
def test_indices_of_any_rank_are_served(ids_shape):
    step = item_of(lambda t, o, i: tf.gather(tf.sqrt(t) * [1.0, 2.0, 3.0], i), ids_shape)
    assert_rows_only(step, np.full(ids_shape, 2))


@pytest.mark.parametrize(
    "build",
    {
        "along the second axis": lambda t, o, i: tf.gather(tf.sqrt(t), tf.minimum(i, 2), axis=1),
        "in batches": lambda t, o, i: tf.gather(tf.sqrt(t), tf.zeros((ROWS, 1), tf.int32), batch_dims=1),
        "of a softmax": lambda t, o, i: tf.gather(tf.nn.softmax(t), i),
        "of a sum over rows": lambda t, o, i: tf.gather(tf.cumsum(t), i),
        "of what is no variable's": lambda t, o, i: tf.gather(tf.sqrt(tf.ones((ROWS, 3))), i),
        "of a checked table": lambda t, o, i: tf.gather(tf.debugging.check_numerics(t, "bad"), i),
    }.items(),
    ids=lambda pair: pair[0],
)
def test_other_gathers_stay(build):
    assert_stays(item_of(build[1]))


def test_a_row_that_has_no_rows_to_go_with_stays():
    """One row of a (7, 3) table is (3,), and (3,) · (1, 3) would be (1, 3)."""
    assert_stays(item_of(lambda t, o, i: tf.gather(t * tf.ones((1, 3), tf.float64), i), ()))


def test_arithmetic_that_others_read_stays_for_them():
    def build(table, other, ids):
        root = tf.sqrt(table)
        return tf.gather(root, ids) + tf.reduce_sum(root)

    step = item_of(build)
    found = applied(step)
    assert any(node.startswith("Sqrt") for node in nodes_with_rows(found, ROWS))
    np.testing.assert_allclose(run(found, [2, 2]), run(step, [2, 2]), rtol=1e-12)
    assert_imports(found.graph_def)


UNARY = [tf.sqrt, tf.square, tf.abs, tf.tanh, tf.sigmoid, tf.math.log1p, tf.identity, tf.math.rsqrt, tf.negative]
BINARY = [tf.add, tf.subtract, tf.multiply, tf.maximum, tf.minimum, tf.math.squared_difference]


@st.composite
def chains(draw):
    """Functions of (table, other) that are elementwise along the rows, of any depth up to four."""

    def value(depth):
        kind = draw(st.sampled_from(["read", "unary", "binary", "scaled"])) if depth else "read"
        if kind == "read":
            which = draw(st.integers(0, 1))
            return lambda tables: tables[which]
        if kind == "unary":
            f, inner = draw(st.sampled_from(UNARY)), value(depth - 1)
            return lambda tables: f(tf.abs(inner(tables)) + 0.1)
        f, left = draw(st.sampled_from(BINARY)), value(depth - 1)
        if kind == "scaled":
            shape = draw(st.sampled_from([(), (1,), (3,), (1, 3), (1, 1)]))
            return lambda tables: f(left(tables), tf.constant(0.7, tf.float64, shape))
        right = value(depth - 1)
        return lambda tables: f(left(tables), right(tables))

    return value(draw(st.integers(1, 4)))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(chain=chains(), ids=st.lists(st.integers(0, ROWS - 1), max_size=6))
def test_any_elementwise_chain_is_the_same_on_rows(chain, ids):
    assert_rows_only(item_of(lambda t, o, i: tf.gather(chain((t, o)), i) * 1.0), np.array(ids, np.int32))
