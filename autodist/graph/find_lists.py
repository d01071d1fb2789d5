"""Finds nodes that exchange lists of tensors, as in loops: they must be in one pipeline stage."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from autodist.graph.index import GraphIndex
from autodist.graph.names import is_control, node_of, output_index
from autodist.graph.op_types import VARIANT, types_of_outputs
from autodist.graph.walks import reach


def find_lists(graph_index: GraphIndex, names: Iterable[str]) -> Mapping[str, frozenset[str]]:
    """Maps each node that outputs or reads a list to all nodes that lists connect with it, directly or indirectly."""
    neighbours: dict[str, set[str]] = {}
    makes = {name: _lists_made(graph_index, name) for name in names}
    for reader in makes:
        for i in graph_index.nodes[reader].input:
            maker = node_of(i)
            if not is_control(i) and output_index(i) in makes.get(maker, ()):
                neighbours.setdefault(reader, set()).add(maker)
                neighbours.setdefault(maker, set()).add(reader)
    result: dict[str, frozenset[str]] = {}
    for name in neighbours:
        if name not in result:
            tied = frozenset(reach([name], neighbours.__getitem__))
            result.update(dict.fromkeys(tied, tied))
    return result


def _lists_made(graph_index: GraphIndex, name: str) -> frozenset[int]:
    """Returns the indices of a node's outputs that are lists."""
    node = graph_index.nodes[name]
    try:
        kinds = list(types_of_outputs(node))
    except AttributeError:  # a function of the graph, called as an op
        return frozenset()
    return frozenset(k for k, kind in enumerate(kinds) if kind == VARIANT)
