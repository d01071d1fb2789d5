"""VariableNode messages: construction for whole and partitioned variables, and iteration over shards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from autodist.placement.partitioning import Partitioning
from autodist.proto import strategy_pb2
from autodist.strategies.partitioning import shards_of
from autodist.strategies.variables import SyncedVariable
from autodist.synchronizers import Synchronizer, field_of, partitioning_of, synchronizers_of

SynchronizerLike = Synchronizer | strategy_pb2.AllReduce | strategy_pb2.ParameterServer
"""A synchronizer, or its protobuf message."""


def whole_node(variable: str, synchronizer: SynchronizerLike) -> strategy_pb2.VariableNode:
    """Returns the node of an unpartitioned variable."""
    return strategy_pb2.VariableNode(variable=variable, **_field(synchronizer))


def partitioned_node(
    variable: str, partitioning: Partitioning, synchronizers: Sequence[SynchronizerLike]
) -> strategy_pb2.VariableNode:
    """Returns the node of a partitioned variable, with a synchronizer for each shard in order."""
    return strategy_pb2.VariableNode(
        variable=variable,
        partition=strategy_pb2.Partition(axis=partitioning.axis, sizes=partitioning.sizes),
        shards=[strategy_pb2.Shard(**_field(synchronizer)) for synchronizer in synchronizers],
    )


def node_of(
    variable: str, partitioning: Partitioning | None, synchronizers: Sequence[SynchronizerLike]
) -> strategy_pb2.VariableNode:
    """Returns the node of a partitioned variable, or of a whole one, which has one synchronizer."""
    return (
        whole_node(variable, synchronizers[0])
        if partitioning is None
        else partitioned_node(variable, partitioning, synchronizers)
    )


def pieces(variable: SyncedVariable, node: strategy_pb2.VariableNode) -> Iterator[tuple[SyncedVariable, Synchronizer]]:
    """Yields each shard as a variable, with its synchronizer; a whole variable is its only shard."""
    yield from zip(shards_of(variable, partitioning_of(node)), synchronizers_of(node), strict=True)


def distinct_shards(
    variable: SyncedVariable, node: strategy_pb2.VariableNode
) -> Iterator[tuple[SyncedVariable, Synchronizer, int]]:
    """Yields a representative of each set of shards with equal length and synchronizer, and the size of the set.

    Names and groups of the shards may differ.
    """
    partitioning, synchronizers = partitioning_of(node), synchronizers_of(node)
    if partitioning is None:
        yield variable, synchronizers[0], 1
        return
    of_length = {length: variable.first_shard(partitioning.axis, length) for length in set(partitioning.sizes)}
    counts = Counter(zip(partitioning.sizes, map(Synchronizer.without_group, synchronizers), strict=True))
    for (length, synchronizer), count in counts.items():
        yield of_length[length], synchronizer, count


def _field(synchronizer: SynchronizerLike) -> dict[str, Any]:
    message = synchronizer.to_message() if isinstance(synchronizer, Synchronizer) else synchronizer
    return {field_of(type(message)): message}
