"""Plan: what a strategy says of one join."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from functools import cached_property

from autodist.compressors import NO_COMPRESSOR, Compressor
from autodist.graph.keeper import Keeper, Pace
from autodist.graph.parts import Join, JoinKind
from autodist.graph.placement import shard_name
from autodist.proto import strategy_pb2

Spec = strategy_pb2.AllReduce.Spec
_COLLECTIVES = (Spec.RING, Spec.NCCL)


Synchronizer = strategy_pb2.VariableNode | strategy_pb2.Shard
"""Has either `all_reduce` or `parameter_server`."""


def synchronizers_of(node: strategy_pb2.VariableNode) -> Iterator[tuple[str, Synchronizer]]:
    """The variable with its synchronizer, or each of its shards with its own."""
    if not node.HasField("partition"):
        yield node.variable, node
    for k, shard in enumerate(node.shards):
        yield shard_name(node.variable, k), shard


def owners_of(node: strategy_pb2.VariableNode) -> dict[str, int]:
    """The owner of the variable, or of each of its shards, where one worker alone holds it."""
    return {n: s.parameter_server.owner for n, s in synchronizers_of(node) if s.HasField("parameter_server")}


class Plan:
    """Answers about a strategy, by join.

    Args:
        strategy: checked and without AUTO.
    """

    def __init__(self, strategy: strategy_pb2.Strategy) -> None:
        self._nodes = {name: said for node in strategy.nodes for name, said in synchronizers_of(node)}

    @cached_property
    def collective(self) -> strategy_pb2.AllReduce.Spec | None:
        """The collective that all variables use, if they do: then nothing may travel in another way beside it."""
        used = {n.all_reduce.spec for n in self._nodes.values() if n.HasField("all_reduce")}
        found = used & set(_COLLECTIVES)
        return found.pop() if found else None

    def owner(self, variable: str) -> int | None:
        """The worker that owns a variable, None if every worker has it."""
        node = self._nodes.get(variable)
        return node.parameter_server.owner if node is not None and node.HasField("parameter_server") else None

    def keeper(self, variable: str) -> Keeper | None:
        """How a variable is kept that one worker owns."""
        node = self._nodes.get(variable)
        if node is None or not node.HasField("parameter_server"):
            return None
        server = node.parameter_server
        pace = Pace.ASYNCHRONOUS if server.asynchronous else Pace.STALE if server.staleness else Pace.SYNCHRONOUS
        return Keeper(server.owner, pace, server.staleness)

    def has_proxy(self, variable: str) -> bool:
        """Whether every worker keeps a copy of an owned variable that its replicas read."""
        node = self._nodes.get(variable)
        return node is not None and node.HasField("parameter_server") and node.parameter_server.local_proxy

    @property
    def is_asynchronous(self) -> bool:
        """Whether every variable that has a gradient is updated by each worker's gradient alone."""
        keepers = [self.keeper(name) for name in self._nodes]
        return bool(keepers) and all(k is not None and k.pace is Pace.ASYNCHRONOUS for k in keepers)

    def owner_of(self, join: Join) -> int | None:
        return self.owner(join.variable) if join.kind is JoinKind.GRADIENT and join.variable else None

    def travels_by_shuffle(self, join: Join) -> bool:
        return self.collective is None and self.owner_of(join) is None

    def group(self, join: Join) -> Hashable:
        """Joins of one group may share a bucket."""
        if join.variable is None:
            return None
        return self._nodes[join.variable].all_reduce.group

    def compressor(self, join: Join) -> Compressor:
        """What makes a gradient smaller before it travels, if anything is to."""
        node = self._nodes.get(join.variable) if join.kind is JoinKind.GRADIENT and join.variable else None
        return NO_COMPRESSOR if node is None else Compressor.from_message(node.all_reduce.compressor)
