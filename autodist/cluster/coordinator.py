"""The coordinator: runs in the chief's process; starts, monitors and ends the other workers."""

from __future__ import annotations

import enum
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from autodist.cluster.addresses import check_reach
from autodist.cluster.agent import find_facts
from autodist.cluster.environments.start_rendezvous import elastic_rendezvous
from autodist.cluster.failure import Ending, choose_cause
from autodist.cluster.ports import ReservedPort
from autodist.cluster.preflight import check_all, compared_packages
from autodist.cluster.protocol import (
    ChiefText,
    ChiefWaits,
    Facts,
    Inspect,
    Lost,
    Membership,
    Message,
    Progress,
    Release,
    Start,
    Stop,
)
from autodist.cluster.script import Script
from autodist.cluster.server_network import ServerNetwork
from autodist.cluster.stalls import SAME_STEPS
from autodist.cluster.worker_connection import WorkerConnection, WorkerGroup
from autodist.errors import ClusterError, MachinesAwayError, WorkerFailedError
from autodist.resources import ResourceSpec, Worker
from autodist.waits import Condition, start_thread

_log = logging.getLogger("autodist.cluster")

# Seconds to collect endings that have one cause. The second applies if all endings so far are echoes: a cut link may be
# detected later than the errors that it causes in TensorFlow.
_COLLECT, _COLLECT_ECHOES = 1.0, 3.0

# Seconds without progress after which writing to an output is abandoned; a terminal may be halted.
_SHOWN_LIMIT = 5.0

# Exit status of a Python that could not flush an output at its exit; training has not failed then.
_NOT_FLUSHED = 120

# Seconds in which the supervisor, which waits for echoes, sets the cause; only a halted process exceeds it.
_CAUSE_LIMIT = 60.0


class _Phase(enum.Enum):
    """Phase of a run: the end of a worker is collected, a failure, expected, or ignored, in this order."""

    PREPARING = enum.auto()
    RUNNING = enum.auto()
    RELEASED = enum.auto()
    STOPPED = enum.auto()


class Coordinator:
    """Starts, monitors and ends all other workers: call `prepare`, `start`, then `finish` or `abort`.

    `prepare` and `start` may run in a thread of their own while the chief's script runs; `abort` ends them, too.
    However this process ends, the other workers end with it, since their agents detect that the channel has closed.
    Nothing is started before `prepare`. With a single worker, nothing is started at all.

    Args:
        spec: the machines.
        on_failure: called once, from a thread of the coordinator, when a worker has failed while the chief's script
            runs; the other workers are being stopped by then. The chief may be blocked inside TensorFlow, waiting for a
            worker that is gone: the callback has to interrupt it (by closing its session).
        script: the script that the workers run.
        environment: environment variables of programs started on this machine; None for those of this process.

    Attributes:
        on_leaving: called with the name of each worker that received SIGTERM, once, from a thread of the coordinator.
        starts_again: of an elastic run, returns True if the processes are to join another start; called at the end.
    """

    def __init__(
        self,
        spec: ResourceSpec,
        on_failure: Callable[[WorkerFailedError], None],
        script: Script,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._workers, self._spec = spec.workers, spec
        self._on_failure, self._script, self._environment = on_failure, script, environment
        self._process = os.getpid()
        self.on_leaving: Callable[[str], None] = lambda worker: None
        self.starts_again: Callable[[], bool] = lambda: False
        self._changed = Condition()  # guards all fields below and the fields of the connections
        self._group = WorkerGroup(spec, self._changed, self._note_ending, self._note_leaving)
        self._phase = _Phase.PREPARING
        self._endings: list[Ending] = []
        self._cause: WorkerFailedError | None = None
        self._is_reported = False
        self._reserved_port: ReservedPort | None = None
        self._network = ServerNetwork(spec, self._changed, self._note_lost)
        self._lost: list[Ending] = []
        self._sending = threading.Lock()  # worker clients receive messages in order, and after `Start`
        self._deferred: list[Message] = []
        self._have_scripts_started = False

    @property
    def addresses(self) -> tuple[str, ...]:
        """ "host:port" of every worker's server as the chief reaches it, by the worker's index, after `prepare`."""
        return self._network.addresses_for(0)

    @property
    def reserved_port(self) -> ReservedPort:
        """The chief's reserved port, available after `prepare`; `start_server` releases it."""
        assert self._reserved_port is not None, "prepare comes first"
        return self._reserved_port

    @property
    def leaving(self) -> tuple[str, ...]:
        """Names of the workers that received SIGTERM."""
        return tuple(connection.name for connection in self._group.connections if connection.is_leaving)

    @property
    def lines(self) -> int:
        """Number of lines of other workers that the chief has printed so far."""
        return self._group.output.lines

    def prepare(self) -> None:
        """Connects to all machines in parallel, starts an agent for each worker, and checks that the run can start.

        Copies the folder under `sync` to the machines first.

        Raises:
            ClusterError: lists every fault of every machine (unreachable, different versions, no script, no port);
                or the run was ended meanwhile.
        """
        try:
            check_reach([worker.node.address for worker in self._workers])
            self._sync_folder()
            self._open_connections()
            answers, own_facts = self._inspect()
            self._require_not_stopped()
            check_all(answers, replace(own_facts, digest=self._script.digest), self._script.name)
            facts = [answer for answer in answers.values() if isinstance(answer, Facts)]
            self._network.open(facts, self._environment, lambda: self._phase is _Phase.STOPPED)
        except BaseException as error:
            # An elastic run may start again without processes that were lost; its end tells the others.
            if not (self._spec.is_elastic and isinstance(error, MachinesAwayError)):
                self.abort("the run could not be prepared", cause=str(error))
            raise

    def start(self, payload: bytes) -> None:
        """Starts the script on every other worker, unless `start_scripts` has; monitors the workers from now on.

        Args:
            payload: bytes that every worker receives as `WorkerClient.payload`.
        """
        with self._sending:
            for worker, connection in zip(self._workers[1:], self._group.connections, strict=True):
                membership = self._membership(worker, payload)
                connection.send(membership if self._have_scripts_started else self._start_message(worker, membership))
            self._group.send(*self._deferred)
            self._run()
        self._network.warn_of_open_ports()
        if self._group.connections:
            start_thread("supervisor", self._supervise)

    def start_scripts(self) -> None:
        """Starts the script on every other worker before `start`, for which the scripts wait when they use AutoDist.

        A script that ends before counts as a failure from `start` on.
        """
        self._require_not_stopped()
        with self._sending:
            for worker, connection in zip(self._workers[1:], self._group.connections, strict=True):
                connection.send(self._start_message(worker, self._membership(worker, b""), waits=True))
            self._have_scripts_started = True

    def _start_message(self, worker: Worker, membership: Membership, waits: bool = False) -> Start:
        script, network = self._script, self._network
        access = network.admitted_to(worker.index), network.forwarded_to(worker.index)
        return Start(script.arguments, script.directory, dict(script.environment), membership, *access, waits)

    def _membership(self, worker: Worker, payload: bytes) -> Membership:
        on_preempt = self._spec.checkpoint is not None and self._spec.checkpoint.on_preempt
        limits = self._spec.stop_timeout, self._spec.silence_timeout
        addresses, code = self._network.addresses_for(worker.index), self._script.pickled_code
        return Membership(worker.index, worker.name, addresses, payload, *limits, code, on_preempt)

    def _run(self) -> None:
        with self._changed:
            self._require_not_stopped()
            self._phase = _Phase.RUNNING
            # Endings before the start count as failures from now on.
            self._endings.extend(connection.ending for connection in self._group.connections if connection.ending)
            self._endings.extend(self._lost)

    def send_text(self, text: str) -> None:
        """Sends a text to every worker, for `WorkerClient.receive_text`, in order. May be called before `start`."""
        self._send_to_clients(ChiefText(text))

    def wait_in_first_step(self) -> None:
        """Notifies the workers that the chief has reached its first step and waits for them."""
        self._send_to_clients(ChiefWaits())

    def require_starting(self) -> None:
        """Checks that every worker can still reach its first step; called while the chief waits in its own.

        Raises:
            WorkerFailedError: the script of a worker has ended.
        """
        for connection in self._group.connections:
            if connection.done:
                reason = f"has ended its script before its first step, in which {self._workers[0].name} waits for it"
                self.end_with_failure(connection.name, f"{reason}. {SAME_STEPS}")
        self.check()

    def finish(self) -> None:
        """Waits until all workers are done, then lets their processes end; called when the chief's script succeeded.

        After a worker has reported that it is done, only an exit status chosen by its script counts as a failure. A
        process that ends slowly or by a signal is only logged.

        Raises:
            WorkerFailedError: a worker failed, or ended with an exit status that its script chose.
        """
        if self._phase is _Phase.PREPARING:
            self.abort("nothing was started")
        if self._is_over():
            return
        with self._changed:
            self._changed.wait_for(
                lambda: self._endings or all(connection.done for connection in self._group.connections)
            )
            if not self._endings:
                self._phase = _Phase.RELEASED
                self._changed.notify_all()
        if self._phase is not _Phase.RELEASED:
            cause = self.first_cause(_CAUSE_LIMIT)
            self.abort("a worker ended badly")
            assert cause is not None
            raise cause
        self._release()

    def abort(self, reason: str, is_failure: bool = True, cause: str = "") -> None:
        """Stops all workers and returns when they are gone, within 10 s. Has no effect after `finish` or `abort`.

        Args:
            reason: reason for the end, for the log.
            is_failure: False if nothing is wrong.
            cause: reason for the workers whose processes go on; empty for the same.
        """
        if self._is_over():
            return
        # If a worker has failed, the others are being stopped already, and its error has to be the last message.
        is_logged = is_failure and self._cause is None
        _log.log(logging.INFO if is_logged else logging.DEBUG, "stopping all workers: %s", reason)
        self._stop_all(Stop(cause or reason) if is_failure else Stop())

    def first_cause(self, timeout: float) -> WorkerFailedError | None:
        """Returns the cause of the run's failure, if a worker failed; waits up to `timeout` seconds for its report.

        The chief calls it when TensorFlow raises an error because another worker is gone: that error names no cause.
        The script may end with the returned error, which the user then reads below the report.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._is_reported, timeout)
            return self._cause

    def request_progress(self, limit: float, are_starting: bool = False) -> dict[str, Progress | None] | None:
        """Requests the progress of every other worker's script; returns it by the worker's name.

        Args:
            limit: seconds after which the value of a worker that has not answered is None.
            are_starting: True if some workers may not have reached their first step, as in `ProgressRequest`.

        Returns:
            None if the run is over.
        """
        progress = self._group.request_progress(limit, are_starting, lambda: not self._is_running)
        with self._changed:
            return progress if self._is_running else None

    def take_senders(self) -> set[str]:
        """Returns the names of workers whose agents sent a message since the last call, or send no heartbeats."""
        return {connection.name for connection in self._group.connections if connection.take_senders()}

    def wait_for_end(self, timeout: float) -> bool:
        """Waits up to `timeout` seconds until the run ends, and returns True if it has."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._is_running, timeout)

    def end_with_failure(self, worker: str, reason: str, is_lost: bool = False, waits: bool = True) -> None:
        """Ends the run as if a worker had failed.

        Args:
            worker: name of the worker.
            reason: reason of its failure.
            is_lost: True as if the connection to it had been lost.
            waits: True to let a worker that is done end its process first, within `cause_timeout`. An exit status that
                its script has chosen is then the first part of the reason.
        """
        connection = next(connection for connection in self._group.connections if connection.name == worker)
        if waits and not (is_lost or self._spec.is_given):
            self._let_end(connection)
        with self._changed:
            if self._is_running:
                if connection.ending is not None and _is_chosen(connection.status):
                    reason = f"{connection.ending.reason}: it {reason}"
                self._endings.append(Ending(worker, reason, connection.last_lines, is_lost))
                self._changed.notify_all()

    def _let_end(self, connection: WorkerConnection) -> None:
        """Lets the process of a worker end if it is done; returns when its exit status is known, or not in time."""
        with self._changed:
            if not (connection.done and self._is_running):
                return
            connection.is_released = True
        connection.send(Release())
        with self._changed:
            self._changed.wait_for(lambda: connection.ending or not self._is_running, self._spec.cause_timeout)

    @property
    def _is_running(self) -> bool:
        return self._phase is _Phase.RUNNING and not self._endings

    def check(self) -> None:
        """Raises the run's failure if there is one; `wait_until_listening` calls it between attempts.

        Raises:
            WorkerFailedError: a worker has failed.
        """
        cause = self.first_cause(0)
        if cause is not None:
            raise cause

    def _is_over(self) -> bool:
        """Returns True if the workers were stopped or released, or this process was forked from the chief's."""
        return self._phase in (_Phase.RELEASED, _Phase.STOPPED) or os.getpid() != self._process

    def _sync_folder(self) -> None:
        if self._spec.sync is not None:
            from autodist.cluster.file_sync import (
                sync_to_all,  # imported here, so that paramiko is loaded only if it is needed
            )

            sync_to_all(self._spec, lambda: self._phase is _Phase.STOPPED)

    def _open_connections(self) -> None:
        for _ in self._group.open(self._environment):
            if self._phase is _Phase.STOPPED:
                self._close()
            self._require_not_stopped()

    def _require_not_stopped(self) -> None:
        if self._phase is _Phase.STOPPED:
            raise ClusterError("the run was ended before its workers were started")

    def _inspect(self) -> tuple[dict[str, Facts | Lost], Facts]:
        """Returns the facts of every worker's machine, by the worker's name, and those of the chief's machine."""
        file, directory = self._script.file, self._script.directory
        hosts = tuple(dict.fromkeys(worker.node.address for worker in self._workers))
        requests = [
            Inspect(file, directory, worker.port, compared_packages(), hosts, self._network.sets_firewall)
            for worker in self._workers
        ]
        self._group.request_facts(requests[1:])
        own_facts, self._reserved_port = find_facts(requests[0])
        answers = self._group.wait_for_facts(lambda: self._phase is _Phase.STOPPED)
        return {self._workers[0].name: own_facts} | answers, own_facts

    def _note_ending(self, connection: WorkerConnection) -> None:
        assert connection.ending is not None
        if self._phase is _Phase.RUNNING and not connection.is_released:
            self._endings.append(connection.ending)
        elif self._phase in (_Phase.RUNNING, _Phase.RELEASED) and connection.status != 0:
            if not _is_chosen(connection.status):
                _log.warning("%s was done; then its process %s.", connection.name, connection.ending.reason)
            elif self._phase is _Phase.RELEASED:  # else `end_with_failure` reports it, with the reason why it is needed
                self._endings.append(connection.ending)

    def _note_lost(self, worker: str, reason: str) -> None:
        """Notes, under `_changed`, that the forwards to a worker's machine have ended."""
        endings = self._lost if self._phase is _Phase.PREPARING else self._endings
        if self._phase in (_Phase.PREPARING, _Phase.RUNNING):
            endings.append(Ending(worker, reason, is_lost=True))

    def _note_leaving(self, worker: str) -> None:
        self.on_leaving(worker)

    def _supervise(self) -> None:
        """Waits for the first failure while the chief's script runs, then stops the workers and calls `on_failure`."""
        with self._changed:
            self._changed.wait_for(lambda: self._endings or self._phase is not _Phase.RUNNING)
            if not self._endings or self._phase is _Phase.RELEASED:
                return
            self._collect()
            cause = choose_cause(self._endings).error()
        self._group.output.drain(_SHOWN_LIMIT)  # the error is shown below the worker's output
        with self._changed:
            self._cause = cause
        # The chief knows at the end of its script if an elastic run starts again.
        self._group.send(Stop(cause.reason, cause.worker, cause.last_lines, is_last=not self._spec.is_elastic))
        self._on_failure(cause)
        with self._changed:
            self._is_reported = True
            self._changed.notify_all()

    def _collect(self) -> None:
        """Waits briefly for other endings with the same cause, unless the first cannot be caused by another one."""
        began = time.monotonic()
        self._changed.wait_for(
            lambda: choose_cause(self._endings).is_first_cause or len(self._endings) == len(self._group.connections),
            _COLLECT,
        )
        rest = began + _COLLECT_ECHOES - time.monotonic()
        self._changed.wait_for(
            lambda: not choose_cause(self._endings).is_echo or len(self._endings) == len(self._group.connections), rest
        )

    def _release(self) -> None:
        """Lets all workers end, and waits until their processes have ended."""
        self._group.send(Release())
        try:
            late = self._group.wait_for_processes()
        except BaseException:  # Ctrl-C
            self._stop_all(Stop())
            raise
        if late:
            _log.warning(
                "%s: the script is done, but its process did not end within %g s, and is stopped. Raise `end_timeout` "
                "if its exit handlers need longer.", ", ".join(late), self._spec.end_timeout,
            )  # fmt: skip
            self._stop_all(Stop())
        else:
            self._dismiss_standby(starts_again=False)
            self._close(shown_limit=self._spec.end_timeout)
        if self._endings:
            raise choose_cause(self._endings).error()

    def _send_to_clients(self, message: Message) -> None:
        with self._sending:
            if self._phase is _Phase.PREPARING:
                self._deferred.append(message)
            else:
                self._group.send(message)

    def _stop_all(self, stop: Stop) -> None:
        """Stops all workers; returns when they are gone."""
        with self._changed:
            self._phase = _Phase.STOPPED
            self._changed.notify_all()
        starts_again = self._spec.is_elastic and self.starts_again()
        # First: it also keeps those that end from joining this start again.
        self._dismiss_standby(starts_again, stop.reason)
        self._group.send(replace(stop, starts_again=starts_again))
        self._close()

    def _dismiss_standby(self, starts_again: bool, failure: str = "") -> None:
        rendezvous = elastic_rendezvous() if self._spec.is_elastic else None
        if rendezvous is not None:
            rendezvous.dismiss(starts_again, failure)

    def _close(self, shown_limit: float = _SHOWN_LIMIT) -> None:
        """Closes the connections, releases the chief's port, and writes the pending output."""
        self._group.close()
        self._network.close()
        if self._reserved_port is not None:
            self._reserved_port.release()
        self._group.output.drain(shown_limit)


def _is_chosen(status: int | None) -> bool:
    """Returns True if a script has chosen the exit status of its process, and it means a failure."""
    return status is not None and status > 0 and status != _NOT_FLUSHED
