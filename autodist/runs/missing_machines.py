"""Looks for the machines that a run does not have: those that were away, and those that were added to its YAML file."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence

from autodist.cluster.machine_check import find_faults
from autodist.cluster.script import Script
from autodist.errors import AutoDistError, ResourceSpecError
from autodist.resources import Node, ResourceSpec
from autodist.runs.joining_search import JoiningSearch
from autodist.runs.lost_run import Joining
from autodist.runs.node_choice import nodes_in_whole_rows
from autodist.runs.restarts import MOST_FAILED_JOINS, earlier_starts
from autodist.strategies import BuildsStrategy

log = logging.getLogger("autodist")


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
        threads = [threading.Thread(target=check, args=(node,), name="autodist-check", daemon=True) for node in nodes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return ready

    def _refuse(self, name: str, reason: str) -> None:
        if self.refused.get(name) != reason:
            self.refused[name] = reason
            log.warning("%s is left out: %s", name, reason)


def _are(names: Sequence[str]) -> str:
    return f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'}"
