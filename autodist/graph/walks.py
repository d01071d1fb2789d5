"""Walks over a graph."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

import tensorflow as tf

from autodist.graph.effects import NO_EFFECT
from autodist.graph.index import GraphIndex

N = TypeVar("N", bound=Hashable)


def reach(roots: Iterable[N], onward: Callable[[N], Iterable[N]]) -> set[N]:
    """Returns the roots and all that `onward` reaches from them.

    >>> sorted(reach(["a"], {"a": ["b", "c"], "b": ["a"], "c": []}.__getitem__))
    ['a', 'b', 'c']
    """
    result: set[N] = set()
    front = list(roots)
    while front:
        name = front.pop()
        if name not in result:
            result.add(name)
            front.extend(onward(name))
    return result


def writes_before(graph_index: GraphIndex, node: str, handle: str) -> list[str]:
    """Returns the nodes that write the variable of a handle before a node runs, by name."""
    before = reach([node], graph_index.sources.__getitem__) - {node}
    return sorted(name for name in before if handle in graph_index.effects.get(name, NO_EFFECT).writes)


def topological(graph_def: tf.compat.v1.GraphDef) -> list[tf.compat.v1.NodeDef]:
    """Returns the nodes of `graph_def` in topological order; a Step has them as `graph_index.order`.

    Raises:
        ValueError: if the graph has a cycle that is not a v1 loop's.
    """
    graph_index = GraphIndex(graph_def)
    return [graph_index.nodes[name] for name in graph_index.order]
