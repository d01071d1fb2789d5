"""Lists: nodes that hand one another lists of tensors, as loops do, which cannot be sent from stage to stage."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from autodist.graph.index import GraphIndex
from autodist.graph.names import is_control, node_of, output_index
from autodist.graph.op_types import VARIANT, types_of_outputs
from autodist.graph.walks import reach


def find_lists(graph_index: GraphIndex, names: Iterable[str]) -> Mapping[str, frozenset[str]]:
    """For each node that makes or reads a list of tensors, all those that are tied to it by such.

    Args:
        wiring: of the step.
        names: the nodes that are looked at.
    """
    beside: dict[str, set[str]] = {}
    makes = {name: _lists_made(graph_index, name) for name in names}
    for reader in makes:
        for i in graph_index.nodes[reader].input:
            maker = node_of(i)
            if not is_control(i) and output_index(i) in makes.get(maker, ()):
                beside.setdefault(reader, set()).add(maker)
                beside.setdefault(maker, set()).add(reader)
    found: dict[str, frozenset[str]] = {}
    for name in beside:
        if name not in found:
            tied = frozenset(reach([name], beside.__getitem__))
            found.update(dict.fromkeys(tied, tied))
    return found


def _lists_made(graph_index: GraphIndex, name: str) -> frozenset[int]:
    """Which outputs of a node are lists."""
    node = graph_index.nodes[name]
    try:
        kinds = list(types_of_outputs(node))
    except AttributeError:  # a function of the graph's, called as an op
        return frozenset()
    return frozenset(k for k, kind in enumerate(kinds) if kind == VARIANT)
