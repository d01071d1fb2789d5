"""Launch of the other workers in the background: connects to their machines and starts their scripts."""

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
from autodist.waits import join

log = logging.getLogger("autodist")

_END_LIMIT = 5.0
"""Seconds to wait for the thread to notice that the run was ended."""

_MOST_NAMES = 4
"""The largest number of workers that the log lists by name."""

_launches: list[WorkerLaunch] = []
"""Launches of this process that no AutoDist has made a step with; the last one is current."""


class WorkerLaunch:
    """The launch of all workers except the chief, in a thread.

    They run the script as it was when AutoDist was imported (options, arguments, directory), in the environment at the
    construction of this object. Later changes by the script have no effect.

    Args:
        spec: the machines.
        seed: seed of the run.
        payload: start message for the workers.
        startup: shows the progress of the start.
        script: what the workers run; None: the script of this process.

    Attributes:
        coordinator: coordinator of the workers.
        seed: seed of the run.
        on_failure: called when a worker has failed, as `Coordinator` documents.
        has_joined: True if an AutoDist makes steps with them.
    """

    def __init__(
        self, spec: ResourceSpec, seed: int, payload: bytes, startup: StartupProgress, script: Script | None = None
    ) -> None:
        self._spec, self.seed, self._payload, self._startup = spec, seed, payload, startup
        self.on_failure: Callable[[WorkerFailedError], None] = lambda failure: None
        self.has_joined = False
        self.coordinator = Coordinator(spec, self._on_failure, script or Script.of_this_process(), dict(os.environ))
        self._error: BaseException | None = None
        self._is_awaited = self._is_ended = False
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._start, name="autodist-starting", daemon=True)
        startup.start()
        self._thread.start()
        _launches.append(self)

    @staticmethod
    def under_way(spec: ResourceSpec) -> WorkerLaunch | None:
        """Returns the launch that an earlier AutoDist of the script has begun for the same machines, if still unused.

        Aborts a launch for other machines: a run has one set of workers, most likely that of the latest AutoDist.
        """
        while _launches:
            earlier = _launches[-1]
            if earlier.has_joined:
                return None
            if earlier._spec == spec and not earlier.has_failed:
                return earlier
            _launches.remove(earlier)
            earlier.abort("the script has made another AutoDist", is_failure=False)
        return None

    @staticmethod
    def wait_for_current() -> None:
        """Returns when the launch that has begun, if any, has started all workers.

        Raises:
            ClusterError: lists every fault of every machine.
        """
        if _launches:
            _launches[-1].wait()

    @staticmethod
    def abort_unused(reason: str) -> None:
        """Ends the workers of launches that no AutoDist makes steps with.

        Args:
            reason: reason for the end.
        """
        while _launches and not _launches[-1].has_joined:
            _launches.pop().abort(reason)

    @property
    def has_failed(self) -> bool:
        """True if the others could not be started."""
        return self._error is not None

    @property
    def fault(self) -> ClusterError | None:
        """The error that has prevented the launch or ended one of the workers."""
        if isinstance(self._error, ClusterError):
            return self._error
        return self.coordinator.first_cause(0)

    def check(self) -> None:
        """Raises the error of the launch, if there is one.

        Raises:
            ClusterError: lists every fault of every machine.
        """
        if self._error is not None:
            raise self._error

    def wait(self) -> None:
        """Returns when all scripts were started.

        Raises:
            ClusterError: lists every fault of every machine.
        """
        self._is_awaited = True
        join(self._thread)
        self.check()

    def abort(self, reason: str, is_failure: bool = True) -> None:
        """Ends all workers that were started; see `Coordinator.abort`."""
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
                self._startup.log_done("reached %s", ", ".join(far))
            self.coordinator.start(self._payload)
            self._startup.log_done("started %s", name_others(self._spec))
        except BaseException as error:  # noqa: BLE001 - the script's thread raises it
            if self._is_ended:
                return  # the abort caused the error
            self._error = error
            if not self._is_awaited and isinstance(error, AutoDistError):
                log.error("%s\nThe script raises this error at its next use of AutoDist, or at its end.", error)


def name_others(spec: ResourceSpec) -> str:
    """Formats all workers except the chief for the log: their names, or their number if there are many."""
    names = [worker.name for worker in spec.workers[1:]]
    return ", ".join(names) if len(names) <= _MOST_NAMES else f"{len(names)} workers"
