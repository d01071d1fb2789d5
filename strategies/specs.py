"""What AUTO stands for."""

from __future__ import annotations

from dataclasses import replace

from autodist.proto import strategy_pb2
from autodist.strategies.nodes import node_of
from autodist.synchronizers import COLLECTIVES, AllReduce, all_synchronizers, cut_of, synchronizers_of

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
        said = synchronizers_of(node)
        if any(one.way == AUTO for one in said):
            known = [replace(one, spec=spec) if isinstance(one, AllReduce) and one.way == AUTO else one for one in said]
            node.CopyFrom(node_of(node.variable, cut_of(node), known))
    return resolved


def effective_spec(strategy: strategy_pb2.Strategy) -> str:
    """What AUTO stands for in this strategy."""
    ways = {synchronizer.way for _, synchronizer in all_synchronizers(strategy)} - {AUTO}
    return next(iter(ways)) if len(ways) == 1 and ways <= set(COLLECTIVES) else SHUFFLE
