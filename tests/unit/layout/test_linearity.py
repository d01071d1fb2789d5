"""Tensors proportional to a given tensor, op by op: verified by scaling it."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import op_def_registry  # names of an op's inputs

from autodist.graph.index import GraphIndex
from autodist.graph.ops import linear_operands
from autodist.graph.ops.table import TABLE
from autodist.layout.linearity import Grade, find_linearity


def graded(function, **options):
    """Returns the grade of a function's result for a seed, and the ops that are nonlinear in it."""
    with tf.Graph().as_default() as graph:
        seed = tf.raw_ops.PlaceholderWithDefault(input=tf.ones([]), shape=[], name="seed")
        tf.identity(function(seed), "made")
    graph_index = GraphIndex(graph.as_graph_def())
    found = find_linearity(graph_index, ["seed"], **options)
    return found.of("made"), [graph_index.nodes[name].op for name in found.nonlinear]


ROWS = np.arange(6.0, dtype="float32").reshape(3, 2)


@pytest.mark.parametrize(
    "function",
    [
        lambda s: s * ROWS,
        lambda s: (s * ROWS) @ ROWS.T / 3.0,
        lambda s: tf.concat([s * ROWS, tf.zeros([1, 2])], 0),
        lambda s: tf.where(ROWS > 2.0, s * ROWS, tf.zeros_like(ROWS)),
        lambda s: tf.where(tf.equal(ROWS, 2.0), s * ROWS, tf.zeros_like(ROWS)),
        lambda s: tf.add_n([s * ROWS, tf.transpose(s * ROWS.T)]),
        lambda s: tf.einsum("ab,cb->ac", s * ROWS, ROWS),
        lambda s: tf.gather(tf.pad(s * ROWS, [[1, 0], [0, 0]]), [0, 2]),
        lambda s: tf.cast(tf.cast(s * ROWS, tf.float16), tf.float32),
        lambda s: tf.while_loop(lambda k, a: k < 3, lambda k, a: (k + 1, a + s * ROWS), (0, tf.zeros([3, 2])))[1],
        lambda s: tf.cond(tf.reduce_sum(ROWS) > 0, lambda: s * 2.0, lambda: -s),
        lambda s: tf.map_fn(lambda row: row * s, tf.constant(ROWS)),
    ],
)
def test_is_proportional(function):
    assert graded(function) == (Grade.LINEAR, [])


def is_equal_to_itself(value):
    return tf.where(tf.equal(value, value), 0.0, 1.0)


def test_a_comparison_with_itself_is_independent_without_nan():
    assert graded(lambda s: ROWS + is_equal_to_itself(tf.cast(s, tf.bool)))[0] is Grade.FREE
    assert graded(lambda s: s * (ROWS + is_equal_to_itself(tf.cast(s, tf.bool))))[0] is Grade.LINEAR
    assert graded(lambda s: ROWS + is_equal_to_itself(s))[0] is Grade.NONLINEAR


@pytest.mark.parametrize(
    "function, op",
    [
        (tf.sqrt, "Sqrt"),
        (lambda s: s * s, "Mul"),
        (lambda s: 1.0 / s, "RealDiv"),
        (lambda s: s + 1.0, "AddV2"),
        (lambda s: tf.where(s > 0.5, s, 0.0), "Greater"),
        (lambda s: tf.concat([[s], [1.0]], 0), "ConcatV2"),
        (lambda s: tf.cast(tf.cast(s, tf.int32), tf.float32), "Cast"),
        (lambda s: tf.clip_by_value(s, 0.0, 0.1), "Minimum"),
        (lambda s: tf.cond(s > 0.5, lambda: s, lambda: -s), "Greater"),
        (lambda s: tf.cond(s > 0.5, lambda: (1.0, s), lambda: (1.0, -s))[1], "Greater"),
        (lambda s: tf.while_loop(lambda k, a: k < 3, lambda k, a: (k + 1, a * s), (0, s))[1], "While"),
        (lambda s: tf.numpy_function(lambda x: x, [s], tf.float32), "PyFunc"),
    ],
)
def test_is_nonlinear(function, op):
    grade, ops = graded(function)
    assert grade is Grade.NONLINEAR
    assert op in ops or (op == "While" and "StatelessWhile" in ops)


@pytest.mark.parametrize(
    "first, body, grade",
    [
        (lambda s: s, lambda s, a: a * 2.0, Grade.LINEAR),
        (lambda s: tf.zeros([]), lambda s, a: a + s, Grade.LINEAR),
        (lambda s: s, lambda s, a: a * s, Grade.NONLINEAR),
        (lambda s: tf.ones([]), lambda s, a: a + s, Grade.NONLINEAR),
    ],
)
def test_a_loop_of_tensorflow_1_is_graded_until_its_variables_stay(first, body, grade):
    tf.compat.v1.disable_control_flow_v2()
    try:
        found, ops = graded(
            lambda s: tf.compat.v1.while_loop(lambda k, a: k < 3, lambda k, a: (k + 1, body(s, a)), (0, first(s)))[1]
        )
    finally:
        tf.compat.v1.enable_control_flow_v2()
    assert found is grade and bool(ops) == (grade is Grade.NONLINEAR)


def test_a_long_chain_of_sums_is_not_followed_by_recursion():
    def added(seed):
        zero = tf.zeros([])
        for _ in range(1500):
            zero = tf.raw_ops.AddV2(x=zero, y=zero)
        return seed + zero

    assert graded(added) == (Grade.LINEAR, [])


def test_what_only_has_its_shape_does_not_depend_on_it():
    assert graded(lambda s: tf.cast(tf.size(s * ROWS), tf.float32) + tf.reduce_sum(tf.ones_like(s * ROWS)))[1] == []


def test_half_precision_is_seen_where_it_is_reached():
    with tf.Graph().as_default() as graph:
        seed = tf.raw_ops.PlaceholderWithDefault(input=tf.ones([]), shape=[], name="seed")
        tf.cast(tf.constant([1.0]), tf.float16, "elsewhere")
        tf.cast(seed * 2.0, tf.float16, "reached")
    assert find_linearity(GraphIndex(graph.as_graph_def()), ["seed"]).float16_nodes == {"reached"}


PAIRS = {
    "Add": (ROWS, ROWS), "AddV2": (ROWS, ROWS), "Sub": (ROWS, ROWS), "Mul": (ROWS, ROWS), "MatMul": (ROWS, ROWS.T),
    "RealDiv": (ROWS, 1 + ROWS), "DivNoNan": (ROWS, ROWS), "Xdivy": (ROWS, 1 + ROWS), "Xlogy": (ROWS, 1 + ROWS),
    "Xlog1py": (ROWS, 1 + ROWS), "MulNoNan": (ROWS, ROWS), "BiasAdd": (ROWS, ROWS[0]), "TanhGrad": (ROWS, ROWS),
    "SigmoidGrad": (ROWS, ROWS), "SqrtGrad": (1 + ROWS, ROWS), "RsqrtGrad": (1 + ROWS, ROWS), "ReluGrad": (ROWS, ROWS),
    "EluGrad": (ROWS, ROWS), "SeluGrad": (ROWS, ROWS), "SoftplusGrad": (ROWS, ROWS), "SoftsignGrad": (ROWS, ROWS),
    "Relu6Grad": (ROWS, ROWS), "LeakyReluGrad": (ROWS, ROWS), "ReciprocalGrad": (1 + ROWS, ROWS),
    "Neg": (ROWS,), "Cross": (np.eye(3, dtype="float32"), ROWS @ ROWS.T), "BiasAddGrad": (ROWS,),
    "MatrixSolve": (np.eye(3, dtype="float32") * 2, ROWS), "MatrixTriangularSolve": (np.eye(3, dtype="float32"), ROWS),
    "TridiagonalMatMul": (ROWS[:1], ROWS[:1], ROWS[1:2], ROWS.T),
    "Diag": (ROWS[0],), "MatrixBandPart": (ROWS, np.int64(0), np.int64(1)), "Cumsum": (ROWS, np.int32(0)),
}  # fmt: skip


@pytest.mark.parametrize("op", sorted(PAIRS))
def test_the_table_says_what_the_op_does(op):
    """Scaling the linear operands of an op, together or separately, scales its result."""
    values = [tf.constant(v) for v in PAIRS[op]]
    positions, apart = linear_operands(op, len(values))
    before = call(op, values)
    for scaled in [[p] for p in positions] if apart else [positions]:
        after = call(op, [v * 3 if k in scaled else v for k, v in enumerate(values)])
        np.testing.assert_allclose(after, 3 * before, rtol=1e-5, err_msg=f"{op} in {scaled}")


def call(op, values):
    names = [argument.name for argument in op_def_registry.get(op).input_arg]
    return getattr(tf.raw_ops, op)(**dict(zip(names, values, strict=True))).numpy()


def test_all_ops_of_the_table_are_ops():
    assert [op for op in TABLE if op_def_registry.get(op) is None] == []
