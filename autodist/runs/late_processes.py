"""Processes of an elastic run that a scheduler starts late: looks for them, and takes them in by another start."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping

from autodist.cluster.environments.quorum import Quorum
from autodist.cluster.environments.start_rendezvous import elastic_rendezvous
from autodist.cluster.script import Script
from autodist.resources import ResourceSpec
from autodist.runs.lost_run import Joining
from autodist.runs.missing_machines import DEFAULT_INTERVAL
from autodist.runs.node_choice import processes_in_whole_rows
from autodist.runs.restarts import earlier_starts
from autodist.strategies import BuildsStrategy
from autodist.waits import Event

log = logging.getLogger("autodist")

_END_LIMIT = 5.0
"""Seconds to wait for the thread at the end of the run."""


def quorum_of(spec: ResourceSpec, builder: BuildsStrategy) -> Quorum:
    """Returns the part of the processes with which an elastic run starts."""
    assert spec.min_nodes is not None, "the run is elastic"
    earlier, patience = earlier_starts(), spec.rejoin_interval or DEFAULT_INTERVAL
    if earlier.expected:
        patience = max(patience, spec.silence_timeout)  # one that is not back by then counts as lost
    left_out = tuple(int(process) for process in earlier.left_out)
    return Quorum(spec.min_nodes, patience, processes_in_whole_rows(builder), tuple(earlier.expected), left_out)


class LateProcesses:
    """Looks for processes on standby at an interval, in a thread of the chief, until some can join the run.

    Args:
        spec: the machines of the run.
        on_found: called once, from the thread, with the processes that can join.

    Attributes:
        addresses: (), since the scheduler starts the processes, and the run misses none.
        refused: {}, since a process that cannot be used ends.
    """

    addresses: tuple[str, ...] = ()
    refused: Mapping[str, str] = {}

    def __init__(self, spec: ResourceSpec, on_found: Callable[[Joining], None]) -> None:
        self._workers, self._limit, self._on_found = len(spec.workers), spec.reach_timeout, on_found
        self._interval = spec.rejoin_interval or DEFAULT_INTERVAL
        self._script = Script.of_this_process()
        self._over = Event()
        self._thread = threading.Thread(target=self._run, name="autodist-late-processes", daemon=True)

    def begin(self) -> None:
        """Starts to look."""
        self._thread.start()

    def end(self) -> None:
        """Ends a look in progress."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(_END_LIMIT)

    def _run(self) -> None:
        while not self._over.wait(self._interval):
            joining = self._look()
            if joining is not None and not self._over.is_set():
                self._on_found(joining)
                return

    def _look(self) -> Joining | None:
        """Returns the processes that can join now; None if there are none."""
        rendezvous = elastic_rendezvous()
        assert rendezvous is not None, "the run is elastic"
        arrivals, workers = rendezvous.find_joining(self._script, self._limit)
        if not arrivals:
            return None
        names = " and ".join(arrival.name for arrival in arrivals)
        reason = f"{names} {'has' if len(arrivals) == 1 else 'have'} joined"
        return Joining(tuple(str(one.hello.index) for one in arrivals), reason, (), (self._workers, workers))
