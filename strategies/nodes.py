"""VariableNodes: written for whole and for partitioned variables, and read piece by piece."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from autodist.graph.placement import Partitioning
from autodist.proto import strategy_pb2
from autodist.strategies.cut import shards_of
from autodist.strategies.variables import SyncedVariable
from autodist.synchronizers import Synchronizer, cut_of, field_of, synchronizers_of

Said = Synchronizer | strategy_pb2.AllReduce | strategy_pb2.ParameterServer
"""A synchronizer, or the message that says it."""


def whole_node(variable: str, synchronizer: Said) -> strategy_pb2.VariableNode:
    """The node of a variable that is not cut."""
    return strategy_pb2.VariableNode(variable=variable, **_field(synchronizer))


def partitioned_node(variable: str, cut: Partitioning, synchronizers: Sequence[Said]) -> strategy_pb2.VariableNode:
    """The node of a variable that is cut, with a synchronizer for each shard in their order."""
    return strategy_pb2.VariableNode(
        variable=variable,
        partition=strategy_pb2.Partition(axis=cut.axis, sizes=cut.sizes),
        shards=[strategy_pb2.Shard(**_field(synchronizer)) for synchronizer in synchronizers],
    )


def node_of(variable: str, cut: Partitioning | None, synchronizers: Sequence[Said]) -> strategy_pb2.VariableNode:
    """The node of a variable that is cut, or of a whole one, which has one synchronizer."""
    return whole_node(variable, synchronizers[0]) if cut is None else partitioned_node(variable, cut, synchronizers)


def pieces(variable: SyncedVariable, node: strategy_pb2.VariableNode) -> Iterator[tuple[SyncedVariable, Synchronizer]]:
    """Each shard seen as a variable, with its synchronizer; for a whole variable it is the only piece."""
    yield from zip(shards_of(variable, cut_of(node)), synchronizers_of(node), strict=True)


def alike_pieces(
    variable: SyncedVariable, node: strategy_pb2.VariableNode
) -> Iterator[tuple[SyncedVariable, Synchronizer, int]]:
    """Pieces of one length that are synchronised alike, but for their names and groups: the first, and how many."""
    cut, said = cut_of(node), synchronizers_of(node)
    if cut is None:
        yield variable, said[0], 1
        return
    of_length = {length: variable.first_shard(cut.axis, length) for length in set(cut.sizes)}
    counts = Counter(zip(cut.sizes, map(Synchronizer.without_group, said), strict=True))
    for (length, synchronizer), count in counts.items():
        yield of_length[length], synchronizer, count


def _field(synchronizer: Said) -> dict[str, Any]:
    message = synchronizer.to_message() if isinstance(synchronizer, Synchronizer) else synchronizer
    return {field_of(type(message)): message}
