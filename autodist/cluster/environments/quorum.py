"""The quorum of an elastic run: the processes with which it starts, if a part of those that may come suffices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autodist.cluster.environments.handshake import Hello
from autodist.cluster.environments.machines import machines_of
from autodist.cluster.environments.roster import Arrival
from autodist.errors import ClusterError


@dataclass(frozen=True)
class Quorum:
    """The conditions under which a run starts without some of its processes.

    Attributes:
        least: number of processes needed, including the chief.
        time_limit: seconds to wait for further processes, once enough are there.
        usable: for the number of devices of each process, returns how many of the first processes a run can have.
        expected: indices of processes that join again, since the run has started before; none is waited for longer
            than `time_limit`, and no other one at all. (): this is the first start.
        left_out: indices of processes that the run cannot use.
    """

    least: int
    time_limit: float
    usable: Callable[[Sequence[int]], int] = len
    expected: tuple[int, ...] = ()
    left_out: tuple[int, ...] = ()

    def choose(self, own: Hello, arrivals: Sequence[Arrival], replicas: int | None) -> tuple[Arrival, ...] | None:
        """Returns the processes, other than the chief, with which a run can start; None if there are not enough.

        Args:
            own: the `Hello` of the chief.
            arrivals: the other processes that are there, in any order.
            replicas: replicas of each worker; None for one per GPU, or one on its CPU.

        Raises:
            ClusterError: processes on one machine have different devices, or too few.
        """
        ordered = sorted(arrivals, key=lambda arrival: arrival.hello.index)
        machines = machines_of(own, ordered, replicas)
        devices = dict(zip(machines.processes, (len(one.devices) for one in machines.allotments), strict=True))
        count = self.usable([devices[index] for index in (0, *(a.hello.index for a in ordered))])
        return tuple(ordered[: count - 1]) if count >= self.least else None

    def is_met(self, arrivals: Sequence[Arrival], waited: float) -> bool:
        """Returns True if no further process is waited for, once enough are there.

        Args:
            arrivals: the processes that are there, except the chief.
            waited: seconds since enough are there.
        """
        are_back = bool(self.expected) and {*self.expected} <= {arrival.hello.index for arrival in arrivals}
        return are_back or waited >= self.time_limit

    def error(self, count: int) -> ClusterError:
        """Returns the error of a run that cannot start although all `count` processes are there."""
        return ClusterError(
            f"The run cannot start: all {count} processes are there, but no {self.least} or more of them form the mesh "
            "of the strategy. Set the size of one axis to -1, or let as many processes come as the mesh has devices."
        )
