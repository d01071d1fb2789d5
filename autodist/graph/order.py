"""A topological order of a GraphDef, control inputs included; the back edges of v1 loops are left out."""

from __future__ import annotations

from collections.abc import Mapping

import tensorflow as tf

from autodist.graph.names import node_of


def topological(graph_def: tf.compat.v1.GraphDef) -> list[tf.compat.v1.NodeDef]:
    """The nodes of `graph_def`, each after all that it needs.

    Raises:
        ValueError: if the graph has a cycle that is not a v1 loop's.
    """
    nodes: Mapping[str, tf.compat.v1.NodeDef] = {node.name: node for node in graph_def.node}
    waiting: dict[str, int] = {}
    followers: dict[str, list[str]] = {}
    for node in graph_def.node:
        sources = set(map(node_of, node.input))
        if node.op in ("Merge", "RefMerge"):
            sources = {s for s in sources if nodes[s].op not in ("NextIteration", "RefNextIteration")}
        waiting[node.name] = len(sources)
        for source in sources:
            followers.setdefault(source, []).append(node.name)
    ready = [node.name for node in reversed(graph_def.node) if not waiting[node.name]]
    found = []
    while ready:
        name = ready.pop()
        found.append(nodes[name])
        for follower in followers.get(name, ()):
            waiting[follower] -= 1
            if not waiting[follower]:
                ready.append(follower)
    if len(found) != len(nodes):
        stuck = next(name for name, count in waiting.items() if count > 0)
        raise ValueError(f"the graph has a cycle through {stuck!r}")
    return found
