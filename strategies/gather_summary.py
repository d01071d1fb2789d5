"""Describes the gathers of a step whose parameters are sharded layer by layer, in a sentence."""

from __future__ import annotations

from autodist.logs.formatting import counted, readable_bytes
from autodist.proto import strategy_pb2
from autodist.strategies.nodes import distinct_shards
from autodist.strategies.variables import GraphLike, synced_variables


def gather_summary(strategy: strategy_pb2.Strategy, graph_item: GraphLike) -> str:
    """Describes the layers that a step gathers, and the bytes of its collectives; empty if it gathers none.

    Args:
        strategy: one that `check_strategy` accepts.
        graph_item: the captured step that it is for.
    """
    layers: dict[int, int] = {}
    variables = {variable.name: variable for variable in synced_variables(graph_item)}
    for node in strategy.nodes:
        for piece, synchronizer, count in distinct_shards(variables[node.variable], node):
            if synchronizer.gathered_with and not piece.is_sparse:
                number = synchronizer.gathered_with
                layers[number] = layers.get(number, 0) + piece.byte_size * count
    if not layers:
        return ""
    total, again = sum(layers.values()), sum(layers.values()) - layers[max(layers)]
    ahead = "one layer ahead" if strategy.prefetch else "none ahead"
    return (
        f"{counted(len(layers), 'layer')} of up to {readable_bytes(max(layers.values()))}, {ahead}: a step all-gathers "
        f"{readable_bytes(total)} forward and {readable_bytes(again)} backward, and reduce-scatters "
        f"{readable_bytes(total)}"
    )
