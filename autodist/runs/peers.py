"""The other workers of a run, as one worker sees them from the first step to the end of the script."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import tensorflow as tf

from autodist.cluster.ports import stop_listening
from autodist.cluster.protocol import Doing, Progress
from autodist.cluster.script import Script
from autodist.cluster.servers import start_server, wait_until_listening
from autodist.cluster.stalls import Limits, StallWatch
from autodist.cluster.worker_client import WorkerClient
from autodist.errors import ClusterError, WorkerFailedError
from autodist.resources import ResourceSpec
from autodist.runs.startup_progress import StartupProgress
from autodist.runs.worker_launch import WorkerLaunch, name_others
from autodist.runtime.interruptible import InterruptibleExecutor

log = logging.getLogger("autodist")

R = TypeVar("R")

# Errors that TensorFlow raises in the remaining workers when one goes away, or when the session closes during a run.
_GONE = (
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.OutOfRangeError,
    tf.errors.DeadlineExceededError,
    tf.errors.InternalError,
    tf.errors.FailedPreconditionError,
    tf.errors.NotFoundError,
    RuntimeError,  # a closed session
)

# Those that TensorFlow usually raises if another worker is gone, and rarely for a reason in the script.
_ECHOES = (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError)

# TensorFlow's text about the ends of a failed call between servers, and gRPC's text about the failure.
_SERVER = re.compile(r"/job:worker/replica:0/task:(\d+)(?= while calling|:)")
_FAILURE_OF_CALL = re.compile(r'grpc_message:"([^"]*)"')

# Seconds within which the coordinator has handled a lost worker; only a halted process exceeds it.
_CAUSE_LIMIT = 60.0

_CHECK_CONNECTION = "check that the network and firewalls between the machines keep connections open"

_joined: list[Peers] = []
"""The peers that this process has joined."""


class Peers:
    """The other workers: the chief starts and watches them; each worker runs a server that the others connect to.

    With a single worker `guard` is a plain call.

    Args:
        spec: the machines.
        worker_client: connection to the agent that started this process; None on the chief.
        payload: the start message for workers that the chief starts.
        seed: seed of the run.
        startup: shows the progress of the start.
        script: what the other workers run; None: the script of this process.

    Attributes:
        call_mismatch: this worker's call and the chief's, if they reached different calls before all had joined; ""
            stands for a step. None: they have not.
        failure: failure of another worker; None until the chief detects one.
        is_raised: True if the script has seen that failure raised.
        on_leaving: called on the chief, from another thread, with the name of a worker that has received SIGTERM.
        on_observed: called whenever the chief observes this worker's progress, from another thread.
        count_calls: returns `Progress.calls`; called from another thread.
        starts_again: called on the chief, at the end; returns True if the processes are to join another start.
    """

    def __init__(
        self,
        spec: ResourceSpec,
        worker_client: WorkerClient | None,
        payload: bytes,
        seed: int,
        startup: StartupProgress,
        script: Script | None = None,
    ) -> None:
        self._script = script
        self._spec, self._worker_client, self._payload, self._startup = spec, worker_client, payload, startup
        self._seed = seed
        self._launch: WorkerLaunch | None = None
        if worker_client is not None:
            worker_client.let_chief_fail_first(spec.cause_timeout)
        self._executor: InterruptibleExecutor | None = None
        self._joins_since: float | None = None
        self._ended_at: float | None = None
        self.call_mismatch: tuple[str, str] | None = None
        self.failure: WorkerFailedError | None = None
        self.on_leaving: Callable[[str], None] = lambda worker: None
        self.on_observed: Callable[[], None] = lambda: None
        self.count_calls: Callable[[], int | None] = lambda: None
        self.starts_again: Callable[[], bool] = lambda: False
        self._lines_at_failure = 0
        self.is_raised = False

    @property
    def have_joined(self) -> bool:
        """True if this worker has joined others, which may wait for it."""
        return self._executor is not None

    @property
    def is_idle(self) -> bool:
        """True if no call that waits for another worker is in progress."""
        return self._executor is None or self._executor.is_idle

    def wait_until_idle(self, limit: float) -> None:
        """Returns when no call that waits for another worker is in progress, or after `limit` seconds."""
        if self._executor is not None:
            self._executor.wait_until_idle(limit)

    @property
    def fault(self) -> ClusterError | None:
        """On the chief, the error by which the run was lost, if this process did not cause it."""
        if self._launch is None:
            return None
        return self.failure or self._launch.fault

    @property
    def leaving(self) -> tuple[str, ...]:
        """On the chief, names of the workers that have received SIGTERM."""
        return () if self._launch is None else self._launch.coordinator.leaving

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses of all workers' servers, as "host:port", once the workers have joined; () with one worker."""
        if self._worker_client is not None:
            return self._worker_client.addresses
        return () if self._launch is None else self._launch.coordinator.addresses

    def begin(self) -> None:
        """On the chief, starts the other workers, if there are any, in the background."""
        if self._worker_client is None and len(self._spec.workers) > 1 and not _joined and self._launch is None:
            under_way = WorkerLaunch.under_way(self._spec)
            start = self._spec, self._seed, self._payload, self._startup
            self._launch = under_way or WorkerLaunch.take_early(*start) or WorkerLaunch(*start, self._script)
            self._launch.on_failure = self._on_failure
            self._launch.coordinator.on_leaving = self._on_leaving
            self._launch.coordinator.starts_again = self._starts_again

    def check(self) -> None:
        """Raises, in the chief's script, the failure of another worker before the first step.

        Raises:
            ClusterError: the others could not be started.
            WorkerFailedError: one of them has failed.
        """
        if self._executor is None and self._launch is not None:
            self._launch.check()
            if self.failure is not None:
                raise self._without_traceback(self.failure)

    def send_text(self, name: str, text: str) -> None:
        """On the chief, sends the others a text that they receive by `receive_text`, before all have joined.

        Args:
            name: name of the call in which they receive it.
            text: the text to send.
        """
        self.begin()
        if self._launch is not None:
            self._launch.coordinator.send_text(json.dumps([name, text]))

    def receive_text(self, name: str) -> str | None:
        """On another worker, returns the text that the chief sends in the same call; None if the chief is past it."""
        assert self._worker_client is not None, "the chief says it"
        sent_in, text = json.loads(self._worker_client.receive_text() or '["", ""]')
        if sent_in == name:
            return str(text)
        self.call_mismatch = self.call_mismatch or (name, sent_in)
        return None

    def note_missed_text(self) -> None:
        """On another worker that joins, records a call that the chief has sent text in and this script has not made."""
        assert self._worker_client is not None, "the chief says it"
        missed = self._worker_client.receive_text()
        if missed is not None:
            self.call_mismatch = self.call_mismatch or ("", json.loads(missed)[0])

    def join(self, config: tf.compat.v1.ConfigProto) -> str:
        """Connects all workers; returns the target of this worker's session.

        Raises:
            ClusterError: a worker could not be started, or this process has already joined others.
            WorkerFailedError: a worker ended before its server listened.
        """
        if len(self._spec.workers) == 1:
            return ""
        if _joined:
            raise ClusterError(
                "a second AutoDist with several workers in one process: each worker has one server, and the first "
                "AutoDist uses it. Keep the first AutoDist and open its scope() again."
            )
        _joined.append(self)
        self._executor = InterruptibleExecutor()
        self._server = (
            self._start_others(config) if self._worker_client is None else self._join_chief(self._worker_client, config)
        )
        return self._server.target

    def _start_others(self, config: tf.compat.v1.ConfigProto) -> tf.distribute.Server:
        self.begin()
        assert self._launch is not None, "there are others"
        self._launch.has_joined = True
        coordinator, others = self._launch.coordinator, name_others(self._spec)
        with self._startup.showing(f"starting {others}"):
            self._launch.wait()
        coordinator.wait_in_first_step()
        with self._startup.showing(f"waiting for {others} to trace the step and join"):
            server = start_server(coordinator.addresses, 0, coordinator.reserved_port, config)
            self._joins_since = time.monotonic()
            limits = Limits(self._spec.stall_timeout, self._spec.answer_timeout, self._spec.deadlock_timeout)
            StallWatch(coordinator, self._spec.workers[0].name, self._progress, limits)
            # Timed from here, not from the launch: a script may take long to reach its first step.
            try:
                check = coordinator.require_starting
                wait_until_listening(coordinator.addresses, self._spec.start_timeout, check, self._names)
            except WorkerFailedError as failure:
                raise self._without_traceback(failure) from None
            finally:
                self._joins_since = None
        self._startup.log_done("all %d workers have joined", len(self._spec.workers))
        return server

    def _join_chief(self, worker_client: WorkerClient, config: tf.compat.v1.ConfigProto) -> tf.distribute.Server:
        worker_client.progress = self._progress
        worker_client.on_failure = self.fail
        worker_client.check()
        server = start_server(worker_client.addresses, worker_client.index, worker_client.reserved_port, config)
        worker_client.wait_for_chief()
        self.note_missed_text()
        # Longer than the chief, which reports the late worker.
        limit = self._spec.start_timeout + self._spec.cause_timeout
        wait_until_listening(worker_client.addresses, limit, worker_client.check, names=self._names)
        return server

    @property
    def _names(self) -> list[str]:
        return [worker.name for worker in self._spec.workers]

    def _progress(self) -> Progress:
        """Returns the state of this worker's script."""
        self.on_observed()
        if self._ended_at is not None:
            return Progress.of_this_process(Doing.DONE, self._ended_at, self.count_calls())
        joins_since = self._joins_since
        if joins_since is not None:
            return Progress.of_this_process(Doing.JOINING, joins_since)
        assert self._executor is not None, "peers have joined"
        is_stepping, since = self._executor.state
        return Progress.of_this_process(Doing.STEPPING if is_stepping else Doing.ELSE, since, self.count_calls())

    def _on_failure(self, failure: WorkerFailedError) -> None:
        self.failure = failure
        if self._ended_at is None:  # the rest follows at the end of the script, or if it formats the exception
            log.error("%s", failure.headline)
        self.fail(failure)

    def _on_leaving(self, worker: str) -> None:
        self.on_leaving(worker)

    def _starts_again(self) -> bool:
        return self.starts_again()

    def fail(self, error: BaseException) -> None:
        """Raises `error` in every present and future call that waits for other workers."""
        if self._executor is not None:
            self._executor.fail(error)

    def lose(self, worker: str, reason: str) -> NoReturn:
        """On the chief, ends the run as if a worker had failed.

        Raises:
            WorkerFailedError: always, for that worker.
        """
        assert self._launch is not None, "there are others"
        self._launch.coordinator.end_with_failure(worker, reason)
        cause = self._launch.coordinator.first_cause(_CAUSE_LIMIT)
        assert cause is not None, "the coordinator finds one within seconds"
        raise self._without_traceback(cause)

    def give_up(self, worker: int, reason: str) -> None:
        """On the chief, ends the run as if a worker had failed, without waiting; callable from any thread."""
        assert self._launch is not None, "there are others"
        self._launch.coordinator.end_with_failure(self._spec.workers[worker].name, reason, waits=False)

    def guard(self, call: Callable[..., R], *args: Any) -> R:
        """Calls a function that fails if another worker goes away; raises the cause rather than the local symptom.

        Raises:
            WorkerFailedError: another worker failed.
            ClusterError: on another worker than the chief, that its connection to a worker's server broke.
        """
        if self._executor is None:
            return call(*args)
        try:
            return self._executor.call(call, *args)
        except WorkerFailedError as failure:
            raise self._without_traceback(failure) from None
        except _GONE as error:
            cause = self.cause_of(error) or self._broken_connection(error)
            if isinstance(cause, WorkerFailedError):
                raise self._without_traceback(cause) from None
            if cause is not None:
                raise cause from error
            raise

    def cause_of(self, error: BaseException) -> ClusterError | None:
        """Returns the worker failure that caused an error here; None if there is none or it cannot be known here."""
        if self._worker_client is not None and isinstance(error, _ECHOES):
            # The chief reports the failed worker and ends this one, which has nothing to add.
            self._worker_client.wait_to_be_ended(self._spec.cause_timeout)
        if self._worker_client is not None:
            return self._worker_client.failure if isinstance(error, _GONE) else None
        if self._launch is None or not isinstance(error, _GONE):
            return None
        return self.failure or self._launch.coordinator.first_cause(self._spec.cause_timeout)

    def _broken_connection(self, error: BaseException) -> ClusterError | None:
        """Returns the error for a broken connection to the server of a worker that has not ended; None for others.

        On the chief, that worker counts as lost.
        """
        own = 0 if self._worker_client is None else self._worker_client.index
        others = [int(worker) for worker in _SERVER.findall(str(error)) if int(worker) != own]
        failure = _FAILURE_OF_CALL.search(str(error))
        if not others or not isinstance(error, tf.errors.UnavailableError):
            return None
        worker = self._spec.workers[others[0]].name
        end = f"broke{f' ({failure[1]})' if failure else ''}, and the script there goes on; {_CHECK_CONNECTION}"
        if self._launch is None:
            return ClusterError(f"the connection to TensorFlow's server of {worker} {end}.")
        reason = f"was lost: the connection to its TensorFlow server {end}"
        self._launch.coordinator.end_with_failure(worker, reason, is_lost=True)
        return self._launch.coordinator.first_cause(_CAUSE_LIMIT)

    def _without_traceback(self, failure: WorkerFailedError) -> WorkerFailedError:
        """Returns the failure without its traceback, so that its message is the last text that the user reads."""
        self.is_raised = True
        if self._launch is not None:
            self._lines_at_failure = self._launch.coordinator.lines
        return failure.with_traceback(None)

    def abort(self, reason: str) -> None:
        """On the chief, ends the others at once; on another worker, first waits for the chief to report its failure."""
        if self._worker_client is not None and not self.have_joined:
            self._worker_client.wait_for_chief_to_fail()
        if self._launch is None or (self._launch.has_joined and not self.have_joined):
            return  # they belong to another AutoDist
        self._launch.abort(reason)
        is_last_word = self.have_joined or self.is_raised
        if self.failure is not None and is_last_word and self._launch.coordinator.lines > self._lines_at_failure:
            log.error("%s", self.failure)  # repeated below the lines that other workers have printed since

    def leave_process(self, limit: float) -> None:
        """Frees the port of this worker's server, and ends the thread of its calls: the process goes on.

        Args:
            limit: seconds to wait for a call in progress.
        """
        if self._executor is not None:
            self._executor.close(limit)
        stop_listening()

    def finish(self) -> None:
        """On the chief, waits until the others have ended; on the others, until the chief has ended.

        Raises:
            ClusterError: the others could not be started, and the script has not seen that error.
            WorkerFailedError: one has failed.
        """
        self._ended_at = time.monotonic()
        if self._worker_client is not None:
            self._worker_client.wait_for_end()
        elif self._launch is not None and self.have_joined:
            self._launch.coordinator.finish()
        elif self._launch is not None and not self._launch.has_joined:
            self._launch.abort("the script has ended without a step", is_failure=False)
            self._launch.check()
