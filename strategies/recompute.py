"""The option `recompute` of all builders: the blocks of a model whose activations the backward pass recomputes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from autodist.proto import strategy_pb2
from autodist.strategies.variables import GraphLike


def recomputed_blocks(
    choice: bool | Sequence[str], strategy: strategy_pb2.Strategy, graph_item: GraphLike
) -> Iterable[strategy_pb2.RecomputedBlock]:
    """Returns the blocks that the option selects; none without a graph.

    The stages of a pipeline recompute everything if no patterns are set, so they need no blocks.

    Raises:
        OptionError: a pattern matches no layer, or the option is True and no layers repeat.
    """
    if choice is False or (choice is True and strategy.pipeline.stages):
        return []
    # Imports TensorFlow only if there is a graph, which TensorFlow has created.
    from autodist.graph.blocks import find_blocks
    from autodist.graph.step import CapturedStep

    if not isinstance(graph_item, CapturedStep):
        return []
    blocks = find_blocks(graph_item, choice)
    return [strategy_pb2.RecomputedBlock(name=block.name, scopes=block.scopes) for block in blocks]
