"""The records of gradients that TensorFlow keeps for a graph, and their release."""

from __future__ import annotations

import gc
import weakref

import pytest
import tensorflow as tf

from autodist.capture.gradients import forget_custom_gradients


@tf.custom_gradient
def tripled(x):
    return tf.identity(x), lambda upstream: 3.0 * upstream


@tf.RegisterGradient("AutodistTestDoubled")
def _doubled(op, upstream):
    return 2.0 * upstream


def graph_of(operation):
    graph = tf.Graph()
    with graph.as_default():
        x = tf.compat.v1.placeholder(tf.float32, [], "x")
        tf.identity(operation(x), "y")
    return graph


def gradient(graph):
    with graph.as_default():
        (found,) = tf.gradients(graph.get_tensor_by_name("y:0"), graph.get_tensor_by_name("x:0"))
        with tf.compat.v1.Session(graph=graph) as session:
            return session.run(found, {"x:0": 1.0})


def test_custom_gradients_of_a_graph_are_let_go_and_the_graph_with_them():
    graph = graph_of(tripled)
    seen = weakref.ref(graph)
    forget_custom_gradients(graph.as_graph_def())
    with pytest.raises(LookupError):
        gradient(graph)
    del graph
    gc.collect()
    assert seen() is None


def test_those_of_other_graphs_remain():
    other = graph_of(tripled)
    forget_custom_gradients(graph_of(tripled).as_graph_def())
    assert gradient(other) == 3.0


def test_a_gradient_that_the_script_has_registered_remains():
    def doubled(x):
        with tf.compat.v1.get_default_graph().gradient_override_map({"Identity": "AutodistTestDoubled"}):
            return tf.identity(x)

    graph = graph_of(doubled)
    forget_custom_gradients(graph.as_graph_def())
    assert gradient(graph) == 2.0
