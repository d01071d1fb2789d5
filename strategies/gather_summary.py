"""The layers that a step gathers if parameters are sharded layer by layer: their bytes, and a sentence on them."""

from __future__ import annotations

from autodist.logs.formatting import counted, readable_bytes
from autodist.proto import strategy_pb2
from autodist.strategies.variables import GraphLike, synced_variables
from autodist.synchronizers import layers_of

_LAYERS_AT_ONCE, _LAYERS_AHEAD = 6, 2
"""Layers that a step has in memory at a time, and the further ones with `prefetch: 1`: gathered parameters, shards on
their way, and gradients that are not summed yet. Measured with 12 layers on two and four workers.
"""


def bytes_by_layer(strategy: strategy_pb2.Strategy, graph_item: GraphLike) -> dict[int, int]:
    """Returns the bytes of each layer that a step gathers, by its number; tables are not gathered, but read by rows.

    Args:
        strategy: one that `check_strategy` accepts.
        graph_item: the captured step that it is for, or one of a place of its mesh.
    """
    sizes: dict[int, int] = {}
    layers = layers_of(strategy)
    for variable in synced_variables(graph_item):
        if variable.name in layers and not variable.is_sparse:
            sizes[layers[variable.name]] = sizes.get(layers[variable.name], 0) + variable.byte_size
    return sizes


def bytes_of_layers_at_once(strategy: strategy_pb2.Strategy, graph_item: GraphLike) -> int:
    """Returns the bytes of gathered layers and their gradients that a step has in memory at a time, at most."""
    sizes = bytes_by_layer(strategy, graph_item).values()
    count = _LAYERS_AT_ONCE + (_LAYERS_AHEAD if strategy.prefetch else 0)
    return min(max(sizes) * count, 2 * sum(sizes)) if sizes else 0


def gather_summary(strategy: strategy_pb2.Strategy, graph_item: GraphLike) -> str:
    """Describes the layers that a step gathers, and the bytes of its collectives; empty if it gathers none.

    Args:
        strategy: one that `check_strategy` accepts.
        graph_item: the captured step that it is for.
    """
    layers = bytes_by_layer(strategy, graph_item)
    if not layers:
        return ""
    total, again = sum(layers.values()), sum(layers.values()) - layers[max(layers)]
    ahead = "one layer ahead" if strategy.prefetch else "none ahead"
    return (
        f"{counted(len(layers), 'layer')} of up to {readable_bytes(max(layers.values()))}, {ahead}: a step all-gathers "
        f"{readable_bytes(total)} forward and {readable_bytes(again)} backward, and reduce-scatters "
        f"{readable_bytes(total)}"
    )
