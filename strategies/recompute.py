"""The option `recompute` of all builders: the blocks of a model whose activations the backward pass recomputes."""

from __future__ import annotations

from collections.abc import Iterable

from autodist.proto import strategy_pb2
from autodist.strategies.base import StrategyBuilder
from autodist.strategies.variables import GraphLike


def recomputed_blocks(
    builder: StrategyBuilder, strategy: strategy_pb2.Strategy, graph_item: GraphLike
) -> Iterable[strategy_pb2.RecomputedBlock]:
    """Returns the blocks that a builder's option selects; none without a graph.

    The stages of a pipeline recompute everything if no patterns are set, so they need no blocks.

    Args:
        builder: the builder.
        strategy: the strategy that it has built.
        graph_item: the captured step.

    Raises:
        OptionError: a pattern matches no layer, or the option is True and no layers repeat.
    """
    if builder.recompute is False or (builder.recompute is True and strategy.pipeline.stages):
        return []
    # Imports TensorFlow only if there is a graph, which TensorFlow has created.
    from autodist.graph.blocks import find_blocks
    from autodist.graph.step import CapturedStep

    if not isinstance(graph_item, CapturedStep):
        return []
    blocks = find_blocks(graph_item, builder.recompute)
    return [strategy_pb2.RecomputedBlock(name=block.name, scopes=block.scopes) for block in blocks]
