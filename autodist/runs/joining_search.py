"""The search for machines or processes that can join a run, at an interval, in a thread of the chief.

Missing machines are those that were away, and those that were added to the YAML file. Late processes are those of an
elastic run that a scheduler has started since. Both join by another start of the run.
"""

from __future__ import annotations

import logging
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

from autodist.cluster.environments.quorum import Quorum
from autodist.cluster.environments.start_rendezvous import elastic_rendezvous
from autodist.cluster.machine_check import find_faults
from autodist.cluster.script import Script
from autodist.errors import AutoDistError, ResourceSpecError
from autodist.resources import Node, ResourceSpec
from autodist.runs.lost_run import Joining
from autodist.runs.node_choice import nodes_in_whole_rows, processes_in_whole_rows
from autodist.runs.restarts import MOST_FAILED_JOINS, earlier_starts
from autodist.strategies import BuildsStrategy
from autodist.waits import Event, start_thread

log = logging.getLogger("autodist")

DEFAULT_INTERVAL = 60.0

_END_LIMIT = 5.0
"""Seconds to wait for the thread, which ends its programs, at the end of the run."""


class JoiningSearch(ABC):
    """Looks at an interval until some machines or processes can join the run.

    Args:
        interval: seconds between two looks; None: 60.
        on_found: called once, from the thread, with those that can join.

    Attributes:
        addresses: addresses of the nodes that the run does not have.
        refused: for each address, the logged reason why it cannot be used.
    """

    addresses: tuple[str, ...] = ()
    refused: Mapping[str, str] = {}

    def __init__(self, interval: float | None, on_found: Callable[[Joining], None]) -> None:
        self._interval, self._on_found = interval or DEFAULT_INTERVAL, on_found
        self._over = Event()
        self._thread = threading.Thread(target=self._run, name="autodist-joining-search", daemon=True)

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

    @abstractmethod
    def _look(self) -> Joining | None:
        """Returns those that can join now; None if there are none."""


def quorum_of(spec: ResourceSpec, builder: BuildsStrategy) -> Quorum:
    """Returns the part of the processes with which an elastic run starts."""
    assert spec.min_nodes is not None, "the run is elastic"
    earlier, limit = earlier_starts(), spec.rejoin_interval or DEFAULT_INTERVAL
    if earlier.expected:
        limit = max(limit, spec.silence_timeout)  # one that is not back by then counts as lost
    left_out = tuple(int(process) for process in earlier.left_out)
    return Quorum(spec.min_nodes, limit, processes_in_whole_rows(builder), tuple(earlier.expected), left_out)


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


class MissingMachines(JoiningSearch):
    """Looks for missing machines at an interval, in a thread of the chief, until some can join the run.

    The machines are checked as before a start, all at the same time, each for at most its timeouts. A machine with a
    fault is left out; each fault is logged once.

    Args:
        spec: the machines of the run.
        builder: its strategy builder. On a mesh, machines join in whole rows.
        on_found: called once, from the thread, with the machines that can join.

    Attributes:
        addresses: addresses of the nodes that the run does not have.
        refused: for each address, and for the file, the logged reason why it cannot be used.
    """

    def __init__(self, spec: ResourceSpec, builder: BuildsStrategy | None, on_found: Callable[[Joining], None]) -> None:
        super().__init__(spec.rejoin_interval, on_found)
        self._spec, self._builder = spec, builder
        self._listed = spec.complete()
        self._file = None if spec.file is None else os.path.abspath(spec.file)  # the script may change its directory
        self._script, self._environment = Script.of_this_process(), dict(os.environ)
        self._failed_joins = earlier_starts().failed_joins
        self.refused: dict[str, str] = dict(earlier_starts().refused)
        self.addresses = tuple(node.address for node in spec.missing)
        self._looks = 0

    def begin(self) -> None:
        """Starts to look, if there may be something to find."""
        if self.addresses:
            log.info("%s missing; looking for it every %g s.", _are(self.addresses), self._interval)
        if self.addresses or self._file is not None:
            super().begin()

    def _look(self) -> Joining | None:
        self._looks += 1
        listed = self._listed = self._read_again()
        here = {node.address for node in self._spec.nodes}
        missing = [node for node in listed.nodes if node.address not in here]
        self.addresses = tuple(node.address for node in missing)
        ready = self._find_ready(listed, [node for node in missing if self._is_due(node)])
        kept = nodes_in_whole_rows([n for n in listed.nodes if n.address in here or n in ready], listed, self._builder)
        least = max(len(self._spec.nodes) + 1, listed.min_nodes or 0)
        if self._over.is_set() or not ready or len(kept) < least:
            return None
        left_out = tuple(node.address for node in listed.nodes if node not in kept)
        joined = tuple(node.address for node in kept if node.address not in here)
        workers = len(self._spec.workers), len(listed.without(left_out).workers)
        return Joining(joined, self._reason(joined), left_out, workers)

    def _reason(self, joined: Sequence[str]) -> str:
        known = {node.address for node in self._spec.missing}
        back, added = [a for a in joined if a in known], [a for a in joined if a not in known]
        clauses = [f"{_are(back)} back"] if back else []
        return " and ".join([*clauses, *([f"{_are(added)} new in {self._spec.file}"] if added else [])])

    def _is_due(self, node: Node) -> bool:
        """Returns True if a node is checked now: ever more seldom after starts that have failed with it."""
        failed = self._failed_joins.get(node.address, 0)
        return failed < MOST_FAILED_JOINS and self._looks % 2**failed == 0

    def _read_again(self) -> ResourceSpec:
        """Returns the machines that the YAML file lists now, or before if it cannot be read."""
        if self._file is None:
            return self._listed
        try:
            read = ResourceSpec.from_file(self._file)
        except ResourceSpecError as error:
            if self.refused.get(self._file) != str(error):
                self.refused[self._file] = str(error)
                log.warning("%s The machines that it named before are used.", error)
            return self._listed
        return read if not read.is_given else self._listed

    def _find_ready(self, listed: ResourceSpec, nodes: Sequence[Node]) -> list[Node]:
        """Returns the nodes that the run can use, in threads that a machine which does not answer cannot hold up."""
        limit = min(listed.connect_timeout, self._interval)
        spec, ready = listed.model_copy(update={"connect_timeout": limit}), []

        def check(node: Node) -> None:
            try:
                faults = find_faults(spec, node, self._script, self._environment, self._over.is_set)
            except (AutoDistError, OSError) as error:  # of this machine, such as a folder under `sync` that is gone
                faults = (str(error),)
            if faults == ():
                ready.append(node)
            elif faults is not None and not self._over.is_set():
                self._refuse(node.address, f"it is there, but cannot be used: {' '.join(faults)}")

        # Daemons: Python waits for the threads of a pool before it runs exit handlers, which end the look.
        threads = [start_thread("check", check, node) for node in nodes]
        for thread in threads:
            thread.join()
        return ready

    def _refuse(self, name: str, reason: str) -> None:
        if self.refused.get(name) != reason:
            self.refused[name] = reason
            log.warning("%s is left out: %s", name, reason)


def _are(names: Sequence[str]) -> str:
    return f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'}"
