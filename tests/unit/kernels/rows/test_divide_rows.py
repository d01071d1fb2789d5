"""DivideRows: no search for zeros if the divisor is a root of sums of squares and the like."""

from __future__ import annotations

import keras
import pytest
import tensorflow as tf

from autodist.graph.editor import GraphEditor
from autodist.kernels.context import Context
from autodist.kernels.rows.divide_rows import DivideRows
from autodist.kernels.rows.signs import Sign, Signs
from tests.unit.graph.graph_text import assert_imports, from_text
from tests.unit.kernels.in_one_process import plan
from tests.unit.kernels.table_steps import table_step


def ops(step):
    return [node.op for node in step.graph_def.node]


def applied(step):
    return DivideRows().apply(step, Context(plan(step), 0))


def test_a_step_without_conditions_is_left_as_it_is():
    step = table_step(keras.optimizers.SGD(0.1))[0].step
    assert applied(step) is step


def test_adagrad_searches_no_table():
    step = table_step(keras.optimizers.Adagrad(0.1))[0].step
    assert "StatelessIf" in ops(step) and "IsNan" in ops(step)
    found = applied(step)
    assert not {"StatelessIf", "IsNan", "Equal", "Any"} & set(ops(found))
    assert_imports(found.graph_def)


def test_shapes_of_what_was_inside_the_condition_are_known():
    found = applied(table_step(keras.optimizers.Adagrad(0.1))[0].step)
    divided = next(n.name for n in found.graph_def.node if n.op == "RealDiv" and "divide_rows" in n.name)
    assert found.spec_of(f"{divided}:0").shape.as_list() == [None, 3]


@pytest.mark.parametrize(
    "optimizer",
    {
        "a difference that may be zero": lambda: keras.optimizers.RMSprop(0.1, centered=True),
        "no more than squares": lambda: keras.optimizers.Adagrad(0.1, epsilon=0.0),
    }.items(),
    ids=lambda pair: pair[0],
)
def test_a_divisor_that_may_be_zero_is_searched(optimizer):
    step = table_step(optimizer[1]())[0].step
    assert applied(step) is step


def test_other_conditions_stay():
    class Halved(keras.optimizers.SGD):
        def update_step(self, gradient, variable, learning_rate):
            slow = tf.reduce_any(tf.math.is_nan(gradient.values))
            super().update_step(
                gradient, variable, tf.cond(slow, lambda: learning_rate / 2.0, lambda: learning_rate * 1.0)
            )

    step = table_step(Halved(0.1))[0].step
    assert applied(step) is step


def sign(build):
    """Returns the sign of `build(v)`, for a variable to which squares are added in the same step."""
    with tf.Graph().as_default() as graph:
        v = tf.Variable(tf.zeros((2,)), name="v", use_resource=True)
        value = tf.raw_ops.ReadVariableOp(resource=v.handle, dtype=v.dtype)
        out = build(value)
        tf.raw_ops.AssignAddVariableOp(resource=v.handle, value=tf.square(value))
    definition = graph.as_graph_def()
    kept = [n for n in definition.node if not n.name.startswith("v/Assign")]  # the initialiser is not of the step
    del definition.node[:]
    definition.node.extend(kept)
    return Signs(GraphEditor(definition)).of(out.name)


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (lambda v: v, Sign.NOT_NEGATIVE),
        (lambda v: tf.sqrt(v + 1e-7), Sign.POSITIVE),
        (tf.sqrt, Sign.NOT_NEGATIVE),
        (lambda v: tf.maximum(v, 1e-7), Sign.POSITIVE),
        (lambda v: 0.9 * v + 0.1 * tf.square(v), Sign.NOT_NEGATIVE),
        (lambda v: (v + 1.0) * (v + 1.0), Sign.NOT_NEGATIVE),
        (lambda v: (v + 1.0) * 0.5, Sign.NOT_NEGATIVE),
        (lambda v: v - 1e-7, Sign.ANY),
        (lambda v: v * -1.0, Sign.ANY),
        (lambda v: v + tf.constant([1.0, -1.0]), Sign.ANY),
        (lambda v: tf.math.unsorted_segment_sum(tf.square(v), [0, 0], 2), Sign.NOT_NEGATIVE),
    ],
)
def test_signs(build, expected):
    assert sign(build) is expected


@pytest.mark.parametrize(
    ("write", "expected"),
    [
        ("w = AssignAddVariableOp(v, s)", Sign.NOT_NEGATIVE),
        ("w = AssignVariableOp(v, r)", Sign.NOT_NEGATIVE),
        ("w = AssignAddVariableOp(v, x)", Sign.ANY),
        ("w = AssignSubVariableOp(v, s)", Sign.ANY),
        ("w = NoOp()", Sign.ANY),
    ],
)
def test_a_variable_is_not_negative_if_all_that_is_written_keeps_it_so(write, expected):
    text = f"v = VarHandleOp()\nr = ReadVariableOp(v)\nx = Placeholder()\ns = Square(x)\n{write}"
    assert Signs(GraphEditor(from_text(text))).of("r:0") is expected


def test_one_write_of_any_sign_is_enough():
    text = """
        v = VarHandleOp()
        r = ReadVariableOp(v)
        x = Placeholder()
        s = Square(x)
        w = AssignAddVariableOp(v, s)
        u = AssignVariableOp(v, x, ^w)
    """
    assert Signs(GraphEditor(from_text(text))).of("r:0") is Sign.ANY


@pytest.mark.parametrize("first", ["r", "t"])
def test_variables_that_are_made_of_each_other_are_not_negative_together_or_not_at_all(first):
    text = """
        v = VarHandleOp()
        r = ReadVariableOp(v)
        u = VarHandleOp()
        t = ReadVariableOp(u)
        x = Placeholder()
        a = AssignVariableOp(v, t)
        b = AssignVariableOp(u, r)
        {more}
    """
    for more, expected in (("", Sign.NOT_NEGATIVE), ("c = AssignVariableOp(v, x)", Sign.ANY)):
        signs = Signs(GraphEditor(from_text(text.format(more=more))))
        order = ["r:0", "t:0"] if first == "r" else ["t:0", "r:0"]
        assert [signs.of(name) for name in order] == [expected, expected]
