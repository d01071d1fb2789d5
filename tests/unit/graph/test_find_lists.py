"""Groups of nodes connected by TensorLists."""

from __future__ import annotations

import tensorflow as tf

from autodist.graph.find_lists import find_lists
from autodist.graph.index import GraphIndex


def loop(x):
    return tf.scan(lambda state, entry: state + entry, x)


def test_what_hands_on_a_list_goes_together_and_each_loop_by_itself():
    traced = tf.function(lambda x: tf.exp(loop(tf.tanh(loop(x))))).get_concrete_function(tf.TensorSpec([4, 2]))
    graph_index = GraphIndex(traced.graph.as_graph_def())
    found = find_lists(graph_index, graph_index.order)
    tied = set(found.values())
    assert len(tied) == 2
    assert all(any(graph_index.nodes[name].op in ("While", "StatelessWhile") for name in names) for names in tied)
    assert all(name in names for name, names in found.items())
    assert not {graph_index.nodes[name].op for name in found} & {"Tanh", "Exp", "Placeholder"}
