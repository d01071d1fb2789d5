"""Processes of an elastic run that a scheduler starts late: looks for them, and takes them in by another start."""

from __future__ import annotations

import logging
from collections.abc import Callable

from autodist.cluster.environments.quorum import Quorum
from autodist.cluster.environments.start_rendezvous import elastic_rendezvous
from autodist.cluster.script import Script
from autodist.resources import ResourceSpec
from autodist.runs.joining_search import DEFAULT_INTERVAL, JoiningSearch
from autodist.runs.lost_run import Joining
from autodist.runs.node_choice import processes_in_whole_rows
from autodist.runs.restarts import earlier_starts
from autodist.strategies import BuildsStrategy

log = logging.getLogger("autodist")


def quorum_of(spec: ResourceSpec, builder: BuildsStrategy) -> Quorum:
    """Returns the part of the processes with which an elastic run starts."""
    assert spec.min_nodes is not None, "the run is elastic"
    earlier, patience = earlier_starts(), spec.rejoin_interval or DEFAULT_INTERVAL
    if earlier.expected:
        patience = max(patience, spec.silence_timeout)  # one that is not back by then counts as lost
    left_out = tuple(int(process) for process in earlier.left_out)
    return Quorum(spec.min_nodes, patience, processes_in_whole_rows(builder), tuple(earlier.expected), left_out)


class LateProcesses(JoiningSearch):
    """Looks for processes on standby at an interval, in a thread of the chief, until some can join the run.

    Args:
        spec: the machines of the run.
        on_found: called once, from the thread, with the processes that can join.
    """

    def __init__(self, spec: ResourceSpec, on_found: Callable[[Joining], None]) -> None:
        super().__init__(spec.rejoin_interval, on_found)
        self._workers, self._limit = len(spec.workers), spec.reach_timeout
        self._script = Script.of_this_process()

    def _look(self) -> Joining | None:
        rendezvous = elastic_rendezvous()
        assert rendezvous is not None, "the run is elastic"
        arrivals, workers = rendezvous.find_joining(self._script, self._limit)
        if not arrivals:
            return None
        names = " and ".join(arrival.name for arrival in arrivals)
        reason = f"{names} {'has' if len(arrivals) == 1 else 'have'} joined"
        return Joining(tuple(str(one.hello.index) for one in arrivals), reason, (), (self._workers, workers))
