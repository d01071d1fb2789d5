"""Describes the all-reduce of a step in a sentence, with the times estimated by the network model that AUTO uses."""

from __future__ import annotations

from autodist.placement.group import Group, worker_count
from autodist.proto import strategy_pb2
from autodist.resources import ResourceSpec
from autodist.strategies.gather_summary import gather_summary
from autodist.strategies.specs import effective_spec, summed_bytes
from autodist.strategies.subgroups import LEAST_WORKERS, choose_subgroups, sum_cost
from autodist.strategies.variables import GraphLike
from autodist.synchronizers import COLLECTIVES, AllReduce, Subgroups, all_synchronizers


def sum_summary(
    strategy: strategy_pb2.Strategy, graph_item: GraphLike, resource_spec: ResourceSpec | None = None
) -> str:
    """Describes the gathers of layers, the subgroups of an all-reduce, the calls that these save, and the time of sums.

    Args:
        strategy: one that `check_strategy` accepts.
        graph_item: the captured step that it is for.
        resource_spec: the machines; None: no times.
    """
    gathers = gather_summary(strategy, graph_item)
    return "; ".join(filter(None, (gathers, _sums(strategy, graph_item, resource_spec))))


def _sums(strategy: strategy_pb2.Strategy, graph_item: GraphLike, resource_spec: ResourceSpec | None) -> str:
    config = strategy.graph_config
    subgroups = Subgroups.of(config.subgroups, Group.of_run(config))
    times = "" if resource_spec is None else _times(strategy, graph_item, resource_spec, subgroups)
    if subgroups is None:
        return times and f"on paper {_whose(strategy)} sums take {times}"
    sizes = sorted({len(group.workers) for group in subgroups.groups})
    of = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    text = (
        f"sums are computed in {len(subgroups.groups)} subgroups of {of} first, then between them: a worker's step "
        f"calls at most {subgroups.most_called} others, {worker_count(config) - 1} without subgroups"
    )
    return f"{text}; on paper they take {times}" if times else text


def _whose(strategy: strategy_pb2.Strategy) -> str:
    """Returns "an outer step's" if the gradients of no variable are summed in each step."""
    reduced = [one for _, one in all_synchronizers(strategy) if isinstance(one, AllReduce)]
    return "an outer step's" if all(one.local is not None for one in reduced) else "a step's"


def _times(
    strategy: strategy_pb2.Strategy, graph_item: GraphLike, resource_spec: ResourceSpec, subgroups: Subgroups | None
) -> str:
    """Returns the times of the sums with the chosen algorithm and with the alternative; empty if not modelled."""
    byte_size = 0 if strategy.pipeline.stages else summed_bytes(strategy, graph_item)
    group = Group.of_run(strategy.graph_config)
    if not byte_size or len(group.workers) < 2 or effective_spec(strategy) in COLLECTIVES:
        return ""
    took = milliseconds(sum_cost(subgroups, resource_spec, byte_size).seconds)
    if subgroups is not None:
        return f"{took}, {milliseconds(sum_cost(None, resource_spec, byte_size).seconds)} without"
    if len(group.workers) < LEAST_WORKERS:
        return took
    others = Subgroups.of(choose_subgroups(resource_spec, byte_size, is_asked=True), group)
    return f"{took}, {milliseconds(sum_cost(others, resource_spec, byte_size).seconds)} in subgroups"


def milliseconds(seconds: float) -> str:
    """Formats a time with three significant digits.

    >>> milliseconds(0.0123456), milliseconds(0.52)
    ('12.3 ms', '520 ms')
    """
    count = 1000 * seconds
    return f"{count:.{2 if count < 9.995 else 1 if count < 99.95 else 0}f} ms"
