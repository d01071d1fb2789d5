"""Costs of recomputation: the bytes that a block no longer keeps, and the FLOPs that it computes again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import tensorflow as tf

from autodist.graph.activations import SAME_BUFFER, byte_size
from autodist.graph.names import is_control, node_of, tensor
from autodist.graph.partial_count import PartialCount
from autodist.graph.recomputation import Block, Recomputation, backward_passes, find_recomputations, is_repeatable
from autodist.graph.step import CapturedStep


@dataclass(frozen=True)
class RecomputationCost:
    """The estimated effect of recomputing one block.

    Attributes:
        block: the name of the block.
        bytes: bytes of the tensors that are freed after the forward pass.
        flops: FLOPs that are computed again.
        kept: the ops whose values are kept because they must not run twice.
    """

    block: str
    bytes: PartialCount
    flops: PartialCount
    kept: tuple[str, ...]


def recomputation_costs(
    step: CapturedStep, blocks: Sequence[Block], graph: tf.Graph, flops: Mapping[str, int | None]
) -> list[RecomputationCost]:
    """Returns the costs of recomputing blocks.

    Args:
        step: the captured step.
        blocks: the blocks.
        graph: the step's nodes, with the shapes that follow from those of its inputs.
        flops: the FLOPs of its nodes; see `flops_of_nodes`.
    """
    own = {name: name for name in step.graph_index.nodes}
    found = [one for passed in backward_passes(step) for one in find_recomputations(step, blocks, passed, own)]
    return [_cost(step, block, [one for one in found if one.block == block], graph, flops) for block in blocks]


def _cost(
    step: CapturedStep,
    block: Block,
    found: Sequence[Recomputation],
    graph: tf.Graph,
    flops: Mapping[str, int | None],
) -> RecomputationCost:
    nodes = dict.fromkeys(name for one in found for name in one.nodes)
    sizes = (byte_size(graph, name) for name in _freed(step, found, nodes))
    return RecomputationCost(
        block.name,
        PartialCount.of(sizes),
        PartialCount.of(flops.get(name, 0) for name in nodes),
        tuple(sorted({step.graph_index.nodes[name].op for one in found for name in one.kept})),
    )


def _freed(step: CapturedStep, found: Iterable[Recomputation], nodes: Mapping[str, None]) -> dict[str, None]:
    """Returns the tensors that the backward pass reads from copies, each buffer once, without lengths."""
    graph_index = step.graph_index
    read = (
        tensor(i)
        for one in found
        for reader in one.readers
        for i in graph_index.nodes[reader].input
        if not is_control(i) and node_of(i) in nodes and is_repeatable(graph_index, node_of(i))
    )
    buffers: dict[str, None] = {}
    for name in read:
        buffer = name
        while node_of(buffer) in nodes and graph_index.nodes[node_of(buffer)].op in SAME_BUFFER:
            buffer = tensor(graph_index.nodes[node_of(buffer)].input[0])
        if node_of(buffer) in nodes:  # otherwise, the buffer is that of a tensor that enters the block
            buffers[buffer] = None
    return buffers
