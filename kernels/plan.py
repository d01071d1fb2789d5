"""Plan: what a strategy says of one join."""

from __future__ import annotations

from collections.abc import Hashable
from functools import cached_property

from autodist.graph.item import Join, JoinKind
from autodist.proto import strategy_pb2

Spec = strategy_pb2.AllReduce.Spec
_COLLECTIVES = (Spec.RING, Spec.NCCL)


class Plan:
    """Answers about a strategy, by join.

    Args:
        strategy: checked and without AUTO.
    """

    def __init__(self, strategy: strategy_pb2.Strategy) -> None:
        self._nodes = {node.variable: node for node in strategy.nodes}

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

    def owner_of(self, join: Join) -> int | None:
        return self.owner(join.variable) if join.kind is JoinKind.GRADIENT and join.variable else None

    def travels_by_shuffle(self, join: Join) -> bool:
        return self.collective is None and self.owner_of(join) is None

    def group(self, join: Join) -> Hashable:
        """Joins of one group may share a bucket."""
        if join.variable is None:
            return None
        return self._nodes[join.variable].all_reduce.group
