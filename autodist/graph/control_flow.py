"""TensorFlow 1 control flow in a graph: `Switch` and `Merge` around branches, `Enter` and `Exit` around loops."""

from __future__ import annotations

from collections.abc import Collection

from autodist.graph.index import GraphIndex
from autodist.graph.ops import Trait, having
from autodist.graph.walks import reach

V1_CONTROL_FLOW = having(Trait.ENTER | Trait.SWITCH | Trait.MERGE | Trait.BACK | Trait.EXIT)
_MERGES, _BACK, _EXITS = map(having, (Trait.MERGE, Trait.BACK, Trait.EXIT))


def find_inside(graph_index: GraphIndex) -> list[str]:
    """Returns the nodes inside branches and loops, which may run never or often; without the nodes at their exits."""
    entrances = {node.name for node in graph_index.having(Trait.SWITCH | Trait.ENTER)}
    return _within(graph_index, entrances, 2)  # a loop variable passes an Enter and a Switch


def find_maybe_dead(graph_index: GraphIndex) -> set[str]:
    """Returns the nodes reachable from TensorFlow 1 branches and loops, which may have no value in a run."""
    entrances = (node.name for node in graph_index.having(Trait.SWITCH | Trait.ENTER))
    return reach(entrances, graph_index.consumers.__getitem__)


def find_in_branches(graph_index: GraphIndex) -> list[str]:
    """Returns the nodes that a TensorFlow 1 branch may skip; loops are ignored."""
    switches = [node.name for node in graph_index.having(Trait.SWITCH)]
    branching = {s for s in switches if graph_index.nodes[graph_index.data[s][1]].op != "LoopCond"}
    return _within(graph_index, branching, 0)


def _within(graph_index: GraphIndex, entrances: Collection[str], entered_by_loops: int) -> list[str]:
    if not entrances:
        return []
    depths: dict[str, int] = {}
    for name in graph_index.order:
        op = graph_index.nodes[name].op
        depth = max((depths.get(source, 0) for source in graph_index.sources[name]), default=0)
        if name in entrances:
            depth += 1
        elif op in _EXITS:
            depth -= entered_by_loops
        elif op in _MERGES and not any(graph_index.nodes[source].op in _BACK for source in graph_index.data[name]):
            depth -= 1
        depths[name] = max(depth, 0)
    return [name for name, depth in depths.items() if depth]
