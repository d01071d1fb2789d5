"""Launch of the other workers in the background: connects to their machines and starts their scripts."""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Callable, Mapping

from autodist.cluster.coordinator import Coordinator
from autodist.cluster.script import Script
from autodist.errors import AutoDistError, ClusterError, WorkerFailedError
from autodist.resources import ResourceSpec
from autodist.runs.startup_progress import StartupProgress
from autodist.waits import Event, join, start_thread

log = logging.getLogger("autodist")

_END_LIMIT = 5.0
"""Seconds to wait for the thread to notice that the run was ended."""

_MOST_NAMES = 4
"""The largest number of workers that the log lists by name."""

_launches: list[WorkerLaunch] = []
"""Launches of this process that no AutoDist has made a step with; the last one is current."""

_early: list[WorkerLaunch] = []
"""The early launch of a restart, until an AutoDist takes it."""

_SET_BY_IMPORTS = ("TF2_BEHAVIOR", "ENABLE_RUNTIME_UPTIME_TELEMETRY", "HDF5_PLUGIN_PATH", "TPU_ML_PLATFORM")
"""Prefixes of the environment variables that the import of TensorFlow or Keras sets, on every worker."""

EARLIER_STARTS = "AUTODIST_RESTARTS"
"""Environment variable of the chief alone: the state of earlier starts, for `restarts`."""


class WorkerLaunch:
    """The launch of all workers except the chief, in a thread.

    They run the script as it was when AutoDist was imported (options, arguments, directory), in the environment at the
    construction of this object. Later changes by the script have no effect.

    Args:
        spec: the machines.
        seed: seed of the run.
        payload: start message for the workers; None: `_take` sets it, and their scripts wait for it.
        startup: shows the progress of the start.
        script: what the workers run; None: the script of this process.

    Attributes:
        coordinator: coordinator of the workers.
        seed: seed of the run.
        on_failure: called when a worker has failed, as `Coordinator` documents.
        has_joined: True if an AutoDist makes steps with them.
    """

    def __init__(
        self,
        spec: ResourceSpec,
        seed: int,
        payload: bytes | None,
        startup: StartupProgress,
        script: Script | None = None,
    ) -> None:
        self._spec, self.seed, self._payload, self._startup = spec, seed, payload, startup
        self.on_failure: Callable[[WorkerFailedError], None] = lambda failure: None
        self.has_joined = False
        self._script = script or Script.of_this_process()
        self._environment = _environment()
        self.coordinator = Coordinator(spec, self._on_failure, self._script, self._environment)
        self._is_taken = Event()
        self._error: BaseException | None = None
        self._is_awaited = self._is_ended = False
        self._process = os.getpid()
        startup.start()
        self._thread = start_thread("starting", self._start)
        (_early if payload is None else _launches).append(self)

    @staticmethod
    def begin_early(spec: ResourceSpec, script: Script) -> None:
        """Starts the scripts before an AutoDist exists, for the one that the script creates later.

        Args:
            spec: machines of the start before.
            script: the script that they ran.
        """
        WorkerLaunch(spec, 0, None, StartupProgress(is_chief=True), script)
        atexit.register(_abort_early, "the script has created no AutoDist of several workers")

    @staticmethod
    def take_early(spec: ResourceSpec, seed: int, payload: bytes, startup: StartupProgress) -> WorkerLaunch | None:
        """Returns the early launch, which goes on with this payload; None if there is none, or if it does not fit.

        It does not fit, and is aborted, if the machines, the script or the environment differ now: local workers get
        the environment in which the script creates its AutoDist. Arguments are those of the constructor.
        """
        if not _early:
            return None
        early = _early[-1]
        now = spec, Script.of_this_process(), _comparable(_environment())
        if now != (early._spec, early._script, _comparable(early._environment)):
            _abort_early("the machines, the script or its environment have changed")
            return None
        _early.remove(early)
        _launches.append(early)
        early._take(seed, payload, startup)
        return early

    def _take(self, seed: int, payload: bytes, startup: StartupProgress) -> None:
        startup.start()
        self.seed, self._payload, self._startup = seed, payload, startup
        self._is_taken.set()

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
    def current_script() -> Script | None:
        """Returns the script of the launch that has begun; None if none has."""
        return _launches[-1]._script if _launches else None

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
        self._is_taken.set()
        self.coordinator.abort(reason, is_failure)
        if os.getpid() == self._process:
            self._thread.join(_END_LIMIT)

    def _on_failure(self, failure: WorkerFailedError) -> None:
        self.on_failure(failure)

    def _start(self) -> None:
        far = [node.address for node in self._spec.nodes if self._spec.ssh_group(node) is not None]
        try:
            self.coordinator.prepare()
            if self._payload is None:
                self.coordinator.start_scripts()
                self._is_taken.wait()
            if self._payload is None:
                return  # aborted
            if far:
                self._startup.log_done("reached %s", ", ".join(far))
            self.coordinator.start(self._payload)
            self._startup.log_done("started %s", name_others(self._spec))
        except BaseException as error:  # noqa: BLE001 - the script's thread raises it
            if self._is_ended:
                return  # the abort caused the error
            self._error = error
            if self._payload is not None and not self._is_awaited and isinstance(error, AutoDistError):
                log.error("%s\nThe script raises this error at its next use of AutoDist, or at its end.", error)


def name_others(spec: ResourceSpec) -> str:
    """Formats all workers except the chief for the log: their names, or their number if there are many."""
    names = [worker.name for worker in spec.workers[1:]]
    return ", ".join(names) if len(names) <= _MOST_NAMES else f"{len(names)} workers"


def _environment() -> dict[str, str]:
    """Returns the environment of processes that start now."""
    return {name: value for name, value in os.environ.items() if name != EARLIER_STARTS}


def _comparable(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if not name.startswith(_SET_BY_IMPORTS)}


def _abort_early(reason: str) -> None:
    while _early:
        _early.pop().abort(reason, is_failure=False)
