"""Whether RING and NCCL, TensorFlow's collectives, stand by themselves and have what they need."""

from __future__ import annotations

from autodist.compressors import NO_COMPRESSOR
from autodist.errors import StrategyError
from autodist.proto import strategy_pb2
from autodist.resources import ResourceSpec
from autodist.strategies.check_nodes import PlaceOf
from autodist.strategies.specs import effective_spec, resolve_spec
from autodist.synchronizers import COLLECTIVES, AllReduce, all_synchronizers


def check_collectives(strategy: strategy_pb2.Strategy, resource_spec: ResourceSpec, place_of: PlaceOf) -> None:
    """Passes a strategy in which no variable is reduced by a collective, or all are, in a way that can be carried out.

    Raises:
        StrategyError: names the variable, the reason and the mend.
    """
    spec = effective_spec(strategy)
    ways = [(name, resolve_spec(said, spec)) for name, said in all_synchronizers(strategy)]
    known = {its.way for _, its in ways}
    # Looked for once a way, and not once a variable: of these, as of workers, there may be thousands.
    others = {way: next(((name, its.way) for name, its in ways if its.way != way), None) for way in known}
    lacking = {way: _lacking(way, resource_spec) for way in known & {*COLLECTIVES}}
    for variable, synchronizer in ways:
        if not isinstance(synchronizer, AllReduce) or synchronizer.spec not in COLLECTIVES:
            continue
        place, way = place_of(variable, "all_reduce_spec"), synchronizer.way
        other = others[way]
        if other is not None:
            raise StrategyError(_beside(variable, way, *other), place)
        if synchronizer.compressor != NO_COMPRESSOR:
            raise StrategyError(
                f"{variable} is reduced by {way} and has the compressor {synchronizer.compressor.text}: "
                "only SHUFFLE carries compressors out. Take all_reduce_spec SHUFFLE for all variables, or leave the "
                "compressor out.",
                place,
            )
        problem = lacking[way]
        if problem is not None:
            raise StrategyError(f"{variable} is reduced by {problem}", place)


def _beside(variable: str, way: str, other: str, others_way: str) -> str:
    """Collectives need step ids that agree on all workers, and hang beside what crosses workers by queues or
    accumulators in the same session."""
    return (
        f"{variable} is reduced by {way} and {other} by {others_way}: TensorFlow's collectives hang in one session "
        f"with any other way between workers. Take all_reduce_spec SHUFFLE in place of {way}, which mixes with "
        f"everything, or {way} for every variable."
    )


def _lacking(way: str, resource_spec: ResourceSpec) -> str | None:
    """What of the machines a collective lacks, after "is reduced by"; None if nothing."""
    servers = [worker for worker in resource_spec.workers if not worker.has_replicas]
    if servers:
        return (
            f"{way}, in which every worker takes part, and {servers[0].name} has no replica; "
            "take all_reduce_spec SHUFFLE."
        )
    others = [replica for replica in resource_spec.replicas if not replica.device.startswith("gpu:")]
    if way == "NCCL" and others:
        return (
            f"NCCL, which needs a GPU for every replica, and {others[0].worker.name} has "
            f"one on {others[0].device}; take all_reduce_spec SHUFFLE, or give it a GPU."
        )
    return None
