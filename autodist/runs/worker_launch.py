"""Starting: the other workers' machines are reached, and their scripts started, while the chief's script goes on."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

from autodist.cluster.coordinator import Coordinator
from autodist.cluster.script import Script
from autodist.errors import AutoDistError, ClusterError, WorkerFailedError
from autodist.resources import ResourceSpec
from autodist.runs.startup_progress import StartupProgress

log = logging.getLogger("autodist")

_END_LIMIT = 5.0
"""Seconds for the thread to see that the run was ended."""

_begun: list[WorkerLaunch] = []
"""What this process has begun, and no AutoDist has stepped with: the last one."""


class WorkerLaunch:
    """The start of all workers but the chief, in a thread of its own.

    They run the script as it was when AutoDist was imported (options, arguments, directory), in the environment of the
    moment at which this is made, whatever the script changes later.

    Args:
        spec: the machines.
        seed: of the run.
        payload: what the others are told.
        start_up: shows how far the start is.

    Attributes:
        coordinator: of the workers.
        seed: of the run.
        on_failure: called where a worker has ended badly, as `Coordinator` says.
        has_joined: whether an AutoDist steps with them.
    """

    def __init__(self, spec: ResourceSpec, seed: int, payload: bytes, start_up: StartupProgress) -> None:
        self._spec, self.seed, self._payload, self._start_up = spec, seed, payload, start_up
        self.on_failure: Callable[[WorkerFailedError], None] = lambda failure: None
        self.has_joined = False
        self.coordinator = Coordinator(spec, self._on_failure, Script.of_this_process(), dict(os.environ))
        self._error: BaseException | None = None
        self._is_awaited = self._is_ended = False
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._start, name="autodist-starting", daemon=True)
        start_up.begins()
        self._thread.start()
        _begun.append(self)

    @staticmethod
    def under_way(spec: ResourceSpec) -> WorkerLaunch | None:
        """The start that an earlier AutoDist of the script has begun for the same machines and made no step with.

        A start for other machines is ended: a run has one set of workers, and the AutoDist made last is the likely one.
        """
        while _begun:
            earlier = _begun[-1]
            if earlier.has_joined:
                return None
            if earlier._spec == spec and not earlier.has_failed:
                return earlier
            _begun.remove(earlier)
            earlier.abort("the script has made another AutoDist", is_failure=False)
        return None

    @property
    def has_failed(self) -> bool:
        """Whether the others could not be started."""
        return self._error is not None

    @property
    def fault(self) -> ClusterError | None:
        """What has kept the others from being started, or has ended one of them."""
        if isinstance(self._error, ClusterError):
            return self._error
        return self.coordinator.first_cause(0)

    def check(self) -> None:
        """Passes unless the others could not be started.

        Raises:
            ClusterError: with every fault of every machine.
        """
        if self._error is not None:
            raise self._error

    def wait(self) -> None:
        """Returns when all scripts were started.

        Raises:
            ClusterError: with every fault of every machine.
        """
        self._is_awaited = True
        self._thread.join()
        self.check()

    def abort(self, reason: str, is_failure: bool = True) -> None:
        """Ends whatever was started; as `Coordinator.abort`."""
        self._is_ended = True
        self.coordinator.abort(reason, is_failure)
        if os.getpid() == self._process:
            self._thread.join(_END_LIMIT)

    def _on_failure(self, failure: WorkerFailedError) -> None:
        self.on_failure(failure)

    def _start(self) -> None:
        far = [node.address for node in self._spec.nodes if self._spec.ssh_group(node) is not None]
        try:
            self.coordinator.prepare()
            if far:
                self._start_up.has_done("reached %s", ", ".join(far))
            self.coordinator.start(self._payload)
            self._start_up.has_done("started %s", some_of([worker.name for worker in self._spec.workers[1:]]))
        except BaseException as error:  # noqa: BLE001 - all of it belongs to the script
            if self._is_ended:
                return  # which is all that went wrong
            self._error = error
            if not self._is_awaited and isinstance(error, AutoDistError):
                log.error("%s\nThe script is told so at its next use of AutoDist, or at its end.", error)


def some_of(names: list[str]) -> str:
    """Names for the log: all, or how many there are."""
    return ", ".join(names) if len(names) <= MOST_NAMES else f"{len(names)} workers"


MOST_NAMES = 4
"""That are told one by one."""
