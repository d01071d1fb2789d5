"""Queries on TensorFlow graphs: the kind of a graph, and its nodes with those of its functions."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from autodist.graph.editor import GraphDef, NodeDef


def is_of_function(graph: object) -> bool:
    """Returns True for the graph of a function, and False for one that sessions run."""
    return isinstance(graph, tf.__internal__.FuncGraph)


def is_in_branch(graph: tf.Graph) -> bool:
    """Returns True for the graph of a branch or of a loop's body within a function."""
    return is_of_function(getattr(graph, "outer_graph", None))


def records_here(in_functions: bool) -> bool:
    """Returns True while a graph of the kind to record in is built.

    Args:
        in_functions: True for graphs of functions, False for plain graphs.
    """
    return not tf.executing_eagerly() and is_of_function(tf.compat.v1.get_default_graph()) == in_functions


def bodies_of(graph_def: GraphDef) -> list[Sequence[NodeDef]]:
    """Returns the nodes of a graph, and those of each of its functions."""
    return [graph_def.node, *(function.node_def for function in graph_def.library.function)]
