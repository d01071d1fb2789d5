"""What AUTO stands for."""

from __future__ import annotations

from dataclasses import replace

from autodist.proto import strategy_pb2
from autodist.synchronizers import (
    COLLECTIVES,
    AllReduce,
    Synchronizer,
    all_synchronizers,
    parts_of,
    set_synchronizer,
    synchronizer_of,
)

AUTO, SHUFFLE = "AUTO", "SHUFFLE"


def resolve_specs(strategy: strategy_pb2.Strategy) -> strategy_pb2.Strategy:
    """A copy in which no node says AUTO.

    AUTO is SHUFFLE, which mixes with everything. Where every other variable is reduced by the same collective,
    RING or NCCL, it follows that one, since collectives stand only by themselves.
    """
    resolved = strategy_pb2.Strategy()
    resolved.CopyFrom(strategy)
    spec = effective_spec(strategy)
    for node in resolved.nodes:
        _resolve(node, spec)
    return resolved


def resolve_node(node: strategy_pb2.VariableNode, spec: str) -> strategy_pb2.VariableNode:
    """A copy that says `spec` where it said AUTO."""
    resolved = strategy_pb2.VariableNode()
    resolved.CopyFrom(node)
    _resolve(resolved, spec)
    return resolved


def _resolve(node: strategy_pb2.VariableNode, spec: str) -> None:
    for part in parts_of(node):
        said = synchronizer_of(part)
        if said.way == AUTO:
            set_synchronizer(part, resolve_spec(said, spec))


def resolve_spec(synchronizer: Synchronizer, spec: str) -> Synchronizer:
    """The same, with `spec` in place of AUTO."""
    if isinstance(synchronizer, AllReduce) and synchronizer.way == AUTO:
        return replace(synchronizer, spec=spec)
    return synchronizer


def effective_spec(strategy: strategy_pb2.Strategy) -> str:
    """What AUTO stands for in this strategy."""
    ways = {synchronizer.way for _, synchronizer in all_synchronizers(strategy)} - {AUTO}
    return next(iter(ways)) if len(ways) == 1 and ways <= set(COLLECTIVES) else SHUFFLE
