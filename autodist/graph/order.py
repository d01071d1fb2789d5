"""A topological order of a GraphDef, control inputs included; the back edges of v1 loops are left out."""

from __future__ import annotations

import tensorflow as tf

from autodist.graph.index import GraphIndex


def topological(graph_def: tf.compat.v1.GraphDef) -> list[tf.compat.v1.NodeDef]:
    """The nodes of `graph_def`, each after all that it needs; a Step knows them as `wiring.order`.

    Raises:
        ValueError: if the graph has a cycle that is not a v1 loop's.
    """
    graph_index = GraphIndex(graph_def)
    return [graph_index.nodes[name] for name in graph_index.order]
