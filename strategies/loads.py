"""Who shall own what: variables dealt out to workers so that no worker's link carries much more than its share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from fractions import Fraction

from autodist.resources import ResourceSpec
from autodist.strategies.variables import SyncedVariable


class GreedyLoads:
    """Bytes that each worker owns so far, and the next best owner.

    A variable goes to the worker whose load, divided by its bandwidth, is least once it has it; the lower index
    wins a tie. Workers of one node share its link evenly. Fractions keep the choice the same on every machine.

    When the heaviest variable has m bytes, all have t, and the workers' bandwidths add up to s, then no worker's
    load / bandwidth exceeds (t + (workers - 1) * m) / s. (R. L. Graham, "Bounds on Multiprocessing Timing
    Anomalies", SIAM J. Appl. Math. 17(2), 1969, carried over to links of unequal speed.)
    """

    def __init__(self, resource_spec: ResourceSpec) -> None:
        self._bandwidths = worker_bandwidths(resource_spec)
        self._loads = [0] * len(self._bandwidths)

    def add(self, worker: int, byte_size: int) -> None:
        """Counts bytes that a worker owns already."""
        self._loads[worker] += byte_size

    def place(self, byte_size: int) -> int:
        """Index of the worker that shall own so many bytes more; they are counted as its own."""
        owner = min(range(len(self._loads)), key=lambda worker: (self._time_with(worker, byte_size), worker))
        self.add(owner, byte_size)
        return owner

    def place_all(self, variables: Iterable[SyncedVariable]) -> dict[str, int]:
        """Owner of each variable by name. The largest are placed first, since small ones fill what gaps remain."""
        ordered = sorted(variables, key=lambda variable: (-variable.byte_size, variable.name))
        return {variable.name: self.place(variable.byte_size) for variable in ordered}

    def _time_with(self, worker: int, byte_size: int) -> Fraction:
        return (self._loads[worker] + byte_size) / self._bandwidths[worker]


def worker_bandwidths(resource_spec: ResourceSpec) -> tuple[Fraction, ...]:
    """Gbit/s of each worker: its node's, shared evenly among the node's workers."""
    workers_of = Counter(worker.node.address for worker in resource_spec.workers)
    return tuple(
        Fraction(worker.node.network_bandwidth) / workers_of[worker.node.address] for worker in resource_spec.workers
    )
