"""Assigns variables to owners so that no worker's link carries much more than its share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from heapq import heapify, heappop, heappush
from math import lcm

from autodist.resources import ResourceSpec
from autodist.strategies.network_model import NetworkModel
from autodist.strategies.variables import SyncedVariable

PieceKey = tuple[str, int]
"""A variable's name, and the index of the shard (0 for a whole variable)."""


class GreedyLoads:
    """Tracks the bytes that each worker owns, including those of earlier steps, and selects the next owner.

    A variable goes to the worker whose load, divided by its bandwidth, is least after the assignment; ties go to the
    lower index. Workers of one node share its link evenly. Exact arithmetic makes the choice equal on every machine.

    Let m be the bytes of the largest variable, t those of all variables, and s the sum of the workers' bandwidths. Then
    no worker's load / bandwidth exceeds (t + (workers - 1) * m) / s. (R. L. Graham, "Bounds on Multiprocessing Timing
    Anomalies", SIAM J. Appl. Math. 17(2), 1969, generalised to links of unequal speed.)

    Args:
        resource_spec: the machines.
        owners: indices of the workers that may be chosen; None: `usual_owners`.
    """

    def __init__(self, resource_spec: ResourceSpec, owners: Sequence[int] | None = None) -> None:
        self.owners = usual_owners(resource_spec) if owners is None else tuple(owners)
        self._owners = frozenset(self.owners)
        # Integers proportional to the time per byte: fractions would take ten times as long.
        bandwidths = worker_bandwidths(resource_spec)
        scale = lcm(*(bandwidth.numerator for bandwidth in bandwidths))
        self._times = [scale * bandwidth.denominator // bandwidth.numerator for bandwidth in bandwidths]
        self._loads = list(resource_spec.owned_bytes or [0] * len(bandwidths))
        # Per link speed, the workers by load. Entries with an outdated load are skipped.
        self._ranked: dict[int, list[tuple[int, int]]] = {}
        for owner in sorted(self.owners, key=lambda owner: (self._loads[owner], owner)):
            self._ranked.setdefault(self._times[owner], []).append((self._loads[owner], owner))

    def add(self, worker: int, byte_size: int) -> None:
        """Adds bytes to the load of a worker."""
        self._loads[worker] += byte_size
        if worker in self._owners:
            heappush(self._ranked[self._times[worker]], (self._loads[worker], worker))

    def place(self, byte_size: int) -> int:
        """Returns the index of the worker that should own `byte_size` more bytes, and adds them to its load."""
        owner = min(map(self._first, self._ranked.values()), key=lambda worker: (self._time(worker, byte_size), worker))
        self.add(owner, byte_size)
        return owner

    def _first(self, ranked: list[tuple[int, int]]) -> int:
        while ranked[0][0] != self._loads[ranked[0][1]]:
            heappop(ranked)
        return ranked[0][1]

    def least_loaded(self, count: int, byte_size: int = 0) -> tuple[int, ...]:
        """Returns the `count` owners with the least load if each got these bytes, best first; changes no load."""
        if count >= len(self.owners):
            return tuple(sorted(self.owners, key=lambda worker: (self._time(worker, byte_size), worker)))
        best = [(self._time(first, byte_size), first) for first in map(self._first, self._ranked.values())]
        heapify(best)
        found: list[int] = []
        while len(found) < count:
            _, owner = heappop(best)
            found.append(owner)
            ranked = self._ranked[self._times[owner]]
            while ranked and (ranked[0][1] == owner or ranked[0][0] != self._loads[ranked[0][1]]):
                heappop(ranked)
            if ranked:
                heappush(best, (self._time(ranked[0][1], byte_size), ranked[0][1]))
        for owner in found:
            self.add(owner, 0)
        return tuple(found)

    def place_pieces(self, sizes: Mapping[PieceKey, int]) -> dict[PieceKey, int]:
        """Assigns an owner to each shard. The largest are placed first, since small ones fill the remaining gaps.

        Args:
            sizes: bytes of each variable, or of each shard.
        """
        ordered = sorted(sizes, key=lambda key: (-sizes[key], key))
        return {key: self.place(sizes[key]) for key in ordered}

    def place_all(self, variables: Iterable[SyncedVariable]) -> dict[str, int]:
        """Assigns an owner to each whole variable, by name; the largest are placed first."""
        owners = self.place_pieces({(variable.name, 0): variable.byte_size for variable in variables})
        return {name: owner for (name, _), owner in owners.items()}

    def _time(self, worker: int, byte_size: int) -> int:
        return (self._loads[worker] + byte_size) * self._times[worker]


def usual_owners(resource_spec: ResourceSpec) -> tuple[int, ...]:
    """Returns the default owners of variables: the workers without replicas, if there are any, else all.

    A node without replicas exists to own variables; the links and memory of other nodes are then left to replicas.
    """
    servers = tuple(worker.index for worker in resource_spec.workers if not worker.has_replicas)
    return servers or tuple(worker.index for worker in resource_spec.workers)


def worker_bandwidths(resource_spec: ResourceSpec) -> tuple[Fraction, ...]:
    """Returns the bandwidth of each worker in Gbit/s: its node's, shared evenly among the node's workers.

    A measured bandwidth is rounded to two digits: sums of fractions stay short, and equal links stay equal.
    """
    if resource_spec.measurements.network is not None:
        network = NetworkModel.of(resource_spec)
        shared = Counter(network.machine_of)
        rates = [Fraction(f"{8e-9 * rate:.2g}") for rate in network.rates]
        return tuple(rates[machine] / shared[machine] for machine in network.machine_of)
    workers_of = Counter(worker.node.address for worker in resource_spec.workers)
    return tuple(
        Fraction(worker.node.network_bandwidth) / workers_of[worker.node.address] for worker in resource_spec.workers
    )
