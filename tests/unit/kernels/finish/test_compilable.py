"""The nodes that XLA can compile, and the allowed contents of a cluster."""

from __future__ import annotations

import pytest
import tensorflow as tf

from autodist.kernels.finish.compilable import Compilable


def nodes_of(build):
    """Returns the nodes that `build` creates, and the predicate for compilable nodes."""
    with tf.Graph().as_default() as graph:
        build()
    definition = graph.as_graph_def()
    return {n.op: n for n in definition.node}, Compilable(definition, allows_loops=False)


@pytest.mark.parametrize(
    "build, op",
    [
        (lambda: tf.linalg.matmul(tf.ones([2, 2]), tf.ones([2, 2])), "MatMul"),
        (lambda: tf.random.stateless_uniform([2], [1, 2]), "StatelessRandomUniformV2"),
        (lambda: tf.split(tf.ones([4]), 2), "Split"),
        (tf.no_op, "NoOp"),
    ],
)
def test_arithmetic_can_be_compiled_and_waits_for_nobody(build, op):
    nodes, compilable = nodes_of(build)
    assert compilable.can_compile(nodes[op]) and not compilable.may_wait(nodes[op])


@pytest.mark.parametrize(
    "build, op",
    [
        (lambda: tf.where(tf.constant([True])), "Where"),
        (lambda: tf.unique([1, 2]), "Unique"),
        (lambda: tf.random.uniform([2], seed=1), "RandomUniform"),
        (lambda: tf.random.Generator.from_seed(1).normal([2]), "RngReadAndSkip"),
        (lambda: tf.strings.as_string(tf.ones([2])), "AsString"),
        (lambda: tf.identity("text"), "Identity"),
        (lambda: tf.debugging.Assert(tf.constant(True), ["no"]), "Assert"),
        (lambda: tf.raw_ops.CheckNumerics(tensor=tf.ones([2]), message=""), "CheckNumerics"),
        (lambda: tf.compat.v1.placeholder_with_default(1.0, []), "PlaceholderWithDefault"),
    ],
)
def test_ops_that_xla_would_refuse_drop_or_draw_differently_stay(build, op):
    nodes, compilable = nodes_of(build)
    assert not compilable.can_compile(nodes[op])
    assert not compilable.may_wait(nodes[op])


@pytest.mark.parametrize("op", ["QueueDequeueV2", "QueueEnqueueV2", "PyFunc", "CollectiveReduceV2"])
def test_ops_that_depend_on_other_workers_may_wait(op):
    _, compilable = nodes_of(tf.no_op)
    node = tf.compat.v1.NodeDef(name="node", op=op)
    assert compilable.may_wait(node) and not compilable.can_compile(node)


def test_a_branch_is_as_its_bodies_are():
    def branches(body):
        return lambda: tf.cond(tf.constant(True), body, lambda: tf.ones([2]))

    plain, compilable = nodes_of(branches(lambda: tf.zeros([2])))
    assert compilable.can_compile(plain["StatelessIf"])
    draws, compilable = nodes_of(branches(lambda: tf.random.uniform([2])))
    assert not compilable.can_compile(draws["If"]) and not compilable.may_wait(draws["If"])
    calls, compilable = nodes_of(branches(lambda: tf.numpy_function(lambda: 1.0, [], tf.float32) + tf.zeros([2])))
    assert not compilable.can_compile(calls["If"]) and compilable.may_wait(calls["If"])
