"""The option `recompute` of all builders: the blocks of a model whose activations the backward pass recomputes."""

from __future__ import annotations

from collections.abc import Iterable

from autodist.options.fields import OptionError
from autodist.proto import strategy_pb2
from autodist.strategies.base import StrategyBuilder
from autodist.strategies.variables import GraphLike

_WITHOUT = {
    "FSDP": "recompute would keep the gathered parameters of the recomputed layers until the backward pass, while FSDP "
    "releases them. Leave recompute out, or use ShardedAllReduce.",
}
"""Builders that refuse the option, with the reason."""


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
        OptionError: a pattern matches no layer, the option is True and no layers repeat, or the builder has no blocks.
    """
    if builder.recompute is False or (builder.recompute is True and strategy.pipeline.stages):
        return []
    if strategy.builder in _WITHOUT:
        raise OptionError("recompute", _WITHOUT[strategy.builder])
    # Imports TensorFlow only if there is a graph, which TensorFlow has created.
    from autodist.graph.blocks import find_blocks
    from autodist.graph.step import CapturedStep

    if not isinstance(graph_item, CapturedStep):
        return []
    blocks = find_blocks(graph_item, builder.recompute)
    return [strategy_pb2.RecomputedBlock(name=block.name, scopes=block.scopes) for block in blocks]
