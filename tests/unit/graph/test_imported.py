"""ImportedGraph runs and reports errors like a graph of `tf.import_graph_def`, but creates objects on demand."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from autodist.graph.imported import ImportedGraph
from tests.unit.graph.graph_text import from_text

GRAPH = from_text("""
    x = Placeholder()
    y = Neg(x)
    w = NoOp()
    z = Mul(x, y, ^w)
""")
GRAPH.node[0].attr["shape"].shape.CopyFrom(tf.TensorShape([2, 3]).as_proto())
GRAPH.node[1].device = "/job:worker/task:1/device:CPU:0"


def functional() -> tf.compat.v1.GraphDef:
    """Returns a graph that calls functions: a branch, a loop, and a direct call."""
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float64, [None], "x")
        (made,) = tf.while_loop(lambda v: tf.reduce_sum(v) < 9.0, lambda v: [v * 2.0], [x])
        called = tf.function(lambda v: v + 1.0)(made)
        tf.identity(tf.cond(called[0] > 2.0, lambda: called, lambda: -called), name="y")
    return graph.as_graph_def()


def test_operations_are_made_when_they_are_asked_for():
    graph = ImportedGraph()
    graph.import_nodes(GRAPH, "a")
    assert len(graph.get_operations()) == 1
    z = graph.get_tensor_by_name("a/z:0")
    assert z.shape == [2, 3] and z.dtype == tf.float32
    assert [t.name for t in z.op.inputs] == ["a/x:0", "a/y:0"]
    assert z.op.inputs[0] is graph.get_tensor_by_name("a/x:0")
    assert {op.name for op in graph.get_operations()} == {"a/x", "a/y", "a/z"}
    graph.make_operations()
    assert [op.name for op in z.op.control_inputs] == ["a/w"]
    assert z.op.inputs[0].consumers() == [z.op.inputs[1].op, z.op]
    assert {op.name for op in graph.get_operations()} == {"a/w", "a/x", "a/y", "a/z"}


def test_the_graph_is_the_one_that_tensorflow_imports():
    for definition in (GRAPH, functional()):
        ours = ImportedGraph()
        ours.import_nodes(definition, "a")
        with tf.Graph().as_default() as graph:
            tf.import_graph_def(definition, name="a")
        assert ours.as_graph_def() == graph.as_graph_def()


def test_two_graphs_and_what_is_built_on_them_run():
    graph, value = ImportedGraph(), np.array([1.0, 0.5])
    graph.import_nodes(functional(), "a")
    graph.import_nodes(functional(), "b")
    with graph.as_default():
        difference = graph.get_tensor_by_name("a/y:0") - graph.get_tensor_by_name("b/y:0")
        tf.import_graph_def(
            functional(), {"x:0": tf.abs(difference)}, name="c"
        )  # creates objects that were not requested
    with tf.compat.v1.Session(graph=graph) as session:
        one, less, last = session.run(["a/y:0", difference, "c/y:0"], {"a/x:0": value, "b/x:0": value[::-1]})
    np.testing.assert_array_equal(one, 8 * value + 1)  # once the sum is 12
    np.testing.assert_array_equal(less, [4.0, -4.0])
    assert last.shape == (2,)
    assert graph.get_operation_by_name("a/y") is graph.get_tensor_by_name("a/y:0").op


def test_what_a_session_knows_by_name_alone_runs():
    graph = ImportedGraph()
    graph.import_nodes(functional())
    with tf.compat.v1.Session(graph=graph) as session:
        assert session.run("y:0", {"x:0": np.array([9.0, 1.0])}).tolist() == [10.0, 2.0]


def test_what_is_not_there_is_not_found():
    graph = ImportedGraph()
    graph.import_nodes(GRAPH)
    with pytest.raises(KeyError, match="refers to an Operation not in the graph"):
        graph.get_operation_by_name("a")


def test_what_tensorflow_does_not_take_is_told():
    with pytest.raises(ValueError, match="nobody"):
        ImportedGraph().import_nodes(from_text("y = Neg(nobody)"))
    twice = ImportedGraph()
    twice.import_nodes(GRAPH)
    with pytest.raises(ValueError, match="already exists"):
        twice.import_nodes(GRAPH)
