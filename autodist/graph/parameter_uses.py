"""Uses of parameters: where a step first combines the values of variables with other values."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from autodist.graph.control_flow import V1_CONTROL_FLOW
from autodist.graph.index import GraphIndex
from autodist.graph.op_types import is_stateless
from autodist.graph.ops import Trait, having

_CONSTANT = having(Trait.SOURCE) - having(Trait.FED)


class ParameterUses:
    """The nodes that are computed from variables alone, and the first nodes that combine them with other values.

        kernel → Cast → MatMul(x, …)      the read and the cast are derived from the kernel; the product uses it

    Args:
        graph_index: the index of the step's graph.
        reads: the reads of the variables.
        without: nodes to ignore.

    Attributes:
        derived: maps each node that is computed from reads and constants alone to these reads.
        first: maps each read to the depth of the first node that uses it. The depth of a node is the number of nodes on
            the longest path to it.
    """

    def __init__(self, graph_index: GraphIndex, reads: Collection[str], without: Collection[str] = ()) -> None:
        self.derived: dict[str, frozenset[str]] = {}
        self.first: dict[str, int] = {}
        depths: dict[str, int] = {}
        for name in graph_index.order:
            if name in without:
                continue
            sources = graph_index.data[name]
            depths[name] = 1 + max((depths.get(source, 0) for source in sources), default=0)
            found = [self.derived[source] for source in sources if source in self.derived]
            if name in reads:
                found = [frozenset([name])]
            if name in reads and len(sources) > 1:  # a lookup
                self._use(found, depths[name])
            elif found and (name in reads or _is_derived(graph_index, name, self.derived)):
                self.derived[name] = frozenset().union(*found)
            else:
                self._use(found, depths[name])

    def _use(self, found: Collection[frozenset[str]], depth: int) -> None:
        for read in frozenset().union(*found):
            self.first[read] = min(depth, self.first.get(read, depth))


def _is_derived(graph_index: GraphIndex, name: str, derived: Mapping[str, object]) -> bool:
    op = graph_index.nodes[name].op
    return (
        op not in V1_CONTROL_FLOW
        and is_stateless(op)
        and all(
            source in derived or graph_index.nodes[source].op in _CONSTANT
            for source in graph_index.data[name]
        )
    )  # fmt: skip
