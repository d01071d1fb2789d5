"""VariableNodes: written for whole and for partitioned variables, and read piece by piece."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autodist.graph.placement import Cut
from autodist.proto import strategy_pb2
from autodist.strategies.cut import shards_of
from autodist.strategies.variables import SyncedVariable

Synchronizer = strategy_pb2.AllReduce | strategy_pb2.ParameterServer

Synchronized = strategy_pb2.VariableNode | strategy_pb2.Shard
"""What has a synchronizer: a whole variable's node, or a shard."""


def whole_node(variable: str, synchronizer: Synchronizer) -> strategy_pb2.VariableNode:
    """The node of a variable that is not cut."""
    if isinstance(synchronizer, strategy_pb2.AllReduce):
        return strategy_pb2.VariableNode(variable=variable, all_reduce=synchronizer)
    return strategy_pb2.VariableNode(variable=variable, parameter_server=synchronizer)


def partitioned_node(variable: str, cut: Cut, synchronizers: Sequence[Synchronizer]) -> strategy_pb2.VariableNode:
    """The node of a variable that is cut, with a synchronizer for each shard in their order."""
    return strategy_pb2.VariableNode(
        variable=variable,
        partition=strategy_pb2.Partition(axis=cut.axis, sizes=cut.sizes),
        shards=[_shard(synchronizer) for synchronizer in synchronizers],
    )


def node_of(variable: str, cut: Cut | None, synchronizers: Sequence[Synchronizer]) -> strategy_pb2.VariableNode:
    """The node of a variable that is cut, or of a whole one, which has one synchronizer."""
    return whole_node(variable, synchronizers[0]) if cut is None else partitioned_node(variable, cut, synchronizers)


def cut_of(node: strategy_pb2.VariableNode) -> Cut | None:
    """How a node's variable is cut; None if it is whole."""
    return Cut(node.partition.axis, tuple(node.partition.sizes)) if node.HasField("partition") else None


def synchronized_parts(node: strategy_pb2.VariableNode) -> Sequence[Synchronized]:
    """What of a node has a synchronizer: its shards, or itself if the variable is whole."""
    return tuple(node.shards) or (node,)


def pieces(variable: SyncedVariable, node: strategy_pb2.VariableNode) -> Iterator[tuple[SyncedVariable, Synchronized]]:
    """Each shard seen as a variable, with its synchronizer; for a whole variable it is the only piece."""
    yield from zip(shards_of(variable, cut_of(node)), synchronized_parts(node), strict=True)


def _shard(synchronizer: Synchronizer) -> strategy_pb2.Shard:
    if isinstance(synchronizer, strategy_pb2.AllReduce):
        return strategy_pb2.Shard(all_reduce=synchronizer)
    return strategy_pb2.Shard(parameter_server=synchronizer)
