"""Functions called by a step are inlined into its graph, and their XLA options are recorded there."""

from __future__ import annotations

import tensorflow as tf

from autodist.graph.jit_scope import is_in_jit_scope
from tests.unit.capture.captured_steps import OUTSIDE, captured, names, ops, plain_step


def test_nested_functions_are_taken_inline():
    inner = tf.function(plain_step)
    found = captured(tf.function(inner))
    assert names(found) == ["outside"]
    assert not any("PartitionedCall" in op for op in ops(found))


def test_a_nested_function_keeps_its_autograph():
    @tf.function
    def clipped(x):
        if tf.reduce_sum(x) > 0:
            return x
        return -x

    def step(x):
        return plain_step(clipped(x))

    assert {"If", "StatelessIf"} & ops(captured(step))


def test_a_nested_function_that_asks_for_xla_is_known_by_its_scope_and_so_is_its_gradient():
    @tf.function(jit_compile=True)
    def loss_of(hidden):
        return tf.reduce_mean(tf.square(tf.sin(hidden)))

    def step(x):
        with tf.GradientTape() as tape:
            loss = loss_of(tf.tanh(x @ OUTSIDE))
        OUTSIDE.assign_sub(0.1 * tape.gradient(loss, OUTSIDE))
        return loss

    found = captured(step).step.graph_def.node
    asked = {n.op for n in found if is_in_jit_scope(n.name)}
    assert {"Sin", "Cos", "Square", "Mean"} <= asked
    assert not {"Tanh", "TanhGrad", "MatMul", "AssignSubVariableOp"} & asked


def test_a_function_in_a_nested_one_that_asks_for_xla_asks_too_and_its_neighbours_do_not():
    inner = tf.function(tf.sin)
    outer = tf.function(lambda x: inner(x) + 1.0, jit_compile=True)

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(outer(x @ OUTSIDE) * inner(x @ OUTSIDE))
        OUTSIDE.assign_sub(0.1 * tape.gradient(loss, OUTSIDE))
        return loss

    asked = [is_in_jit_scope(n.name) for n in captured(step).step.graph_def.node if n.op == "Sin"]
    assert sorted(asked) == [False, True]


def test_a_variable_that_such_a_function_makes_is_named_as_without():
    made = []

    @tf.function(jit_compile=True)
    def scaled(x):
        if not made:
            made.append(tf.Variable(2.0, name="scale"))
        return x * made[0]

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(scaled(x))
        made[0].assign_sub(0.1 * tape.gradient(loss, made[0]))
        return loss

    assert names(captured(step)) == ["scale"]


def test_a_function_called_outside_is_called_as_ever():
    function = tf.function(lambda x: x + 1.0)
    captured(plain_step)
    assert function(tf.constant(1.0)).numpy() == 2.0
    assert function.experimental_get_tracing_count() == 1
