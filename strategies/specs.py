"""What AUTO stands for."""

from __future__ import annotations

from autodist.proto import strategy_pb2
from autodist.strategies.nodes import Synchronized, synchronized_parts


def resolve_specs(strategy: strategy_pb2.Strategy) -> strategy_pb2.Strategy:
    """A copy in which no node says AUTO.

    AUTO is SHUFFLE, which mixes with everything. Where every other variable is reduced by the same collective,
    RING or NCCL, it follows that one, since collectives stand only by themselves.
    """
    resolved = strategy_pb2.Strategy()
    resolved.CopyFrom(strategy)
    spec = effective_spec(strategy)
    for part in _parts(resolved):
        if part.HasField("all_reduce") and part.all_reduce.spec == strategy_pb2.AllReduce.AUTO:
            part.all_reduce.spec = spec
    return resolved


def effective_spec(strategy: strategy_pb2.Strategy) -> strategy_pb2.AllReduce.Spec:
    """What AUTO stands for in this strategy."""
    served = any(part.HasField("parameter_server") for part in _parts(strategy))
    explicit = {part.all_reduce.spec for part in _parts(strategy) if part.HasField("all_reduce")}
    explicit.discard(strategy_pb2.AllReduce.AUTO)
    if served or len(explicit) != 1:
        return strategy_pb2.AllReduce.SHUFFLE
    return explicit.pop()


def _parts(strategy: strategy_pb2.Strategy) -> list[Synchronized]:
    return [part for node in strategy.nodes for part in synchronized_parts(node)]
