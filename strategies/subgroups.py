"""Chooses the subgroups of hierarchical all-reduce, if they pay off."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isqrt

from autodist.placement.group import Group
from autodist.placement.partitioning import even_sizes
from autodist.resources import ResourceSpec
from autodist.strategies.base import workers_with_replicas
from autodist.strategies.network_model import NetworkModel, machines_of
from autodist.synchronizers import Subgroups

LEAST_WORKERS = 4
"""With fewer workers, subgroups would have one worker each, or there would be only one."""

PAYS = 0.8
"""Subgroups are used if a step's sums then take at most this fraction of the time without them."""

BUCKET_BYTES = 4 << 20
"""The approximate size of a bucket."""


@dataclass(frozen=True)
class SumCost:
    """The cost per worker and step of sums over all workers.

    Attributes:
        calls: the maximum number of other workers that execute part of a worker's step.
        messages: the maximum number of messages that a worker sends for each bucket.
        hops: number of sequential messages for a bucket.
        buckets: number of buckets.
        transfer: seconds for the bytes over the link of the slowest machine.
        network: the times of calls and messages.
    """

    calls: int
    messages: int
    hops: int
    buckets: int
    transfer: float
    network: NetworkModel

    @property
    def seconds(self) -> float:
        """The time of one step without overlap with computation."""
        messages = self.network.message * self.messages * self.buckets
        return self.network.call * self.calls + messages + self.network.hop * self.hops + self.transfer


def sum_cost(subgroups: Subgroups | None, spec: ResourceSpec, byte_size: int) -> SumCost:
    """Estimates the cost of summing dense gradients, within subgroups first or over all workers at once.

    Args:
        subgroups: None: all workers at once, by SHUFFLE.
        spec: the machines.
        byte_size: the bytes of the gradients.
    """
    group, network = group_of(spec), NetworkModel.of(spec)
    buckets, count = max(1, -(-byte_size // BUCKET_BYTES)), len(group.workers)
    out = _leaving(subgroups, network.machine_of, group, byte_size)
    transfer = max((out[machine] / network.rates[machine] for machine in out), default=0.0)
    if subgroups is None:
        return SumCost(count - 1, 2 * (count - 1), 2, buckets, transfer, network)
    size, number = max(len(group.workers) for group in subgroups.groups), len(subgroups.groups)
    return SumCost(subgroups.most_called, 2 * (size - 1) + 2 * (number - 1), 4, buckets, transfer, network)


def choose_subgroups(spec: ResourceSpec, byte_size: int, is_asked: bool = False) -> tuple[int, ...]:
    """Returns the subgroup of each worker; empty if subgroups do not pay off.

    Machines with several workers are not split if that is cheaper. Unless subgroups are required, no step calls more
    than 2·(√W+1) other workers.

    Args:
        spec: the machines.
        byte_size: the bytes of the dense gradients that are summed in a step.
        is_asked: True if subgroups are required whenever possible.
    """
    group = group_of(spec)
    if len(group.workers) < LEAST_WORKERS:
        return ()
    at_once = sum_cost(None, spec, byte_size).seconds
    found: list[tuple[float, tuple[int, ...]]] = []
    for numbers in dict.fromkeys(_candidates(spec, group.workers)):
        subgroups = Subgroups.of(numbers, group)
        if subgroups is not None:
            cost = sum_cost(subgroups, spec, byte_size)
            if (cost.calls - 2) ** 2 <= 4 * len(group.workers) or is_asked:
                found.append((cost.seconds, numbers))
    seconds, best = min(found, key=lambda one: one[0])
    return best if is_asked or seconds <= PAYS * at_once else ()


def group_of(spec: ResourceSpec) -> Group:
    """Returns the group of the workers that have replicas; the others are receivers."""
    computing = workers_with_replicas(spec)
    return Group.of_workers(computing, [w.index for w in spec.workers if w.index not in computing])


def _candidates(spec: ResourceSpec, computing: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yields subgroups of neighbours: of whole machines, and of equal numbers of workers."""
    machine_of, root = machines_of(spec), isqrt(len(computing))
    machines = list(dict.fromkeys(machine_of[worker] for worker in computing))
    of_machine = {m: [w for w in computing if machine_of[w] == m] for m in machines}
    counts = (root, root + 1, 2 * root)
    for count in (len(machines), *counts):
        if 2 <= count <= len(machines) < len(computing):
            yield _numbered(spec, [of_machine[m] for m in machines], count)
    for count in counts:
        if 2 <= count <= len(computing) // 2:
            yield _numbered(spec, [[worker] for worker in computing], count)


def _numbered(spec: ResourceSpec, units: Sequence[Sequence[int]], count: int) -> tuple[int, ...]:
    """Returns the subgroup of each worker: `count` runs of units; workers without replicas are assigned in turn."""
    number_of: dict[int, int] = {}
    start = 0
    for number, size in enumerate(even_sizes(len(units), count)):
        number_of |= {worker: number for unit in units[start : start + size] for worker in unit}
        start += size
    servers = [worker.index for worker in spec.workers if worker.index not in number_of]
    number_of |= {worker: position % count for position, worker in enumerate(servers)}
    return tuple(number_of[worker] for worker in range(len(number_of)))


def _leaving(subgroups: Subgroups | None, machine_of: Sequence[int], group: Group, byte_size: int) -> dict[int, float]:
    """Returns the bytes that leave each machine in a step."""
    total = len(group.workers)
    on = [0] * len(set(machine_of))
    for worker in group.workers:
        on[machine_of[worker]] += 1
    out = dict.fromkeys(machine_of, 0.0)
    if subgroups is None:
        for machine, count in enumerate(on):
            out[machine] = 2.0 * byte_size * count * (total - count) / total
        return out
    piece, number = byte_size / subgroups.ranks, len(subgroups.groups)
    for subgroup in subgroups.groups:
        reducing = subgroup.workers[: subgroups.ranks]
        for worker in subgroup.workers:
            far = sum(machine_of[other] != machine_of[worker] for other in reducing)
            out[machine_of[worker]] += far * piece
        for worker in reducing:
            out[machine_of[worker]] += piece * sum(machine_of[w] != machine_of[worker] for w in subgroup.workers)
    for rank in range(subgroups.ranks):
        across = subgroups.across(rank)
        for worker in across:
            far = sum(machine_of[other] != machine_of[worker] for other in across)
            out[machine_of[worker]] += 2 * piece * far / number
    return out
