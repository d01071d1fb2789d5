"""The coordinator: in the chief's process, it starts the other workers, watches them, and ends them."""

from __future__ import annotations

import enum
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from autodist.cluster.addresses import check_reach, host_and_port
from autodist.cluster.agent import find_facts
from autodist.cluster.channels import channels_to_agents
from autodist.cluster.failure import Ending, choose_cause
from autodist.cluster.load_adjusted_clock import LOOK_INTERVAL, Stopwatch, wait_for
from autodist.cluster.output import Output
from autodist.cluster.ports import PortHeld
from autodist.cluster.preflight import check_all, compared_packages
from autodist.cluster.protocol import (
    Ask,
    Facts,
    Inspect,
    Lost,
    Membership,
    Message,
    Progress,
    Release,
    Said,
    Start,
    Stop,
    Waiting,
)
from autodist.cluster.script import Script
from autodist.cluster.stalls import SAME_STEPS
from autodist.cluster.worker_connection import WorkerConnection
from autodist.errors import ClusterError, WorkerFailedError
from autodist.resources import ResourceSpec

_log = logging.getLogger("autodist.cluster")

# Seconds after which it is told whose answer, or end of its process, the run waits for.
_TELLS_AFTER = 5.0

# Endings that one cause has come in within the first; a cut link may show later than what it causes, as an echo.
_COLLECT, _COLLECT_ECHOES = 1.0, 3.0

# Seconds in which an output has to take something, where others wait for it; a terminal may be halted.
_SHOWN_LIMIT = 5.0

# In seconds, beyond what a script has to end by itself.
_STOP_LIMIT = 3.0

# What says that Python could not flush an output at its very end; no failure of what was trained.
_NOT_FLUSHED = 120

# Seconds in which the supervisor, who waits for echoes, tells a cause that is there; only a halted process exceeds it.
_CAUSE_LIMIT = 60.0


class _Phase(enum.Enum):
    """What an ended worker means: nothing yet, a failure, what was asked for, nothing any more."""

    PREPARING = enum.auto()
    RUNNING = enum.auto()
    RELEASED = enum.auto()
    STOPPED = enum.auto()


class Coordinator:
    """The chief's hand on all other workers: `prepare`, `start`, then `finish` or `abort`.

    The first two may run in a thread of their own, beside the chief's script; `abort` ends them, too. However this
    process ends, the other workers end with it: their agents see that the channel has closed. Nothing is started before
    `prepare`, and with a single worker nothing at all.

    Args:
        spec: the machines.
        on_failure: called once, from a thread of the coordinator, when a worker has ended badly while the chief's
            script runs; the others are being stopped by then. The chief may be inside TensorFlow, waiting for a worker
            that is gone: the callback's part is to get it out (close its session).
        script: what the workers run; by default what this process runs.
        environment: that programs are started in on this machine; None: that of this process at the time.

    Attributes:
        on_leaving: called with the name of a worker to which SIGTERM has come, once, from a thread of the coordinator.
    """

    def __init__(
        self,
        spec: ResourceSpec,
        on_failure: Callable[[WorkerFailedError], None],
        script: Script | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._workers, self._spec = spec.workers, spec
        self._on_failure, self._script, self._environment = on_failure, script, environment
        self._process = os.getpid()
        self._output = Output()
        self.on_leaving: Callable[[str], None] = lambda worker: None
        # Guards everything below, and the fields of the links.
        self._changed = threading.Condition()
        self._phase = _Phase.PREPARING
        self._links: tuple[WorkerConnection, ...] = ()
        self._endings: list[Ending] = []
        self._cause: WorkerFailedError | None = None
        self._held: PortHeld | None = None
        self._addresses: tuple[str, ...] = ()
        self._speaking = threading.Lock()  # what members are told comes in order, and after `Start`
        self._said: list[Message] = []

    @property
    def addresses(self) -> tuple[str, ...]:
        """What `prepare` has returned."""
        return self._addresses

    @property
    def held(self) -> PortHeld:
        """The chief's own port; `start_server` releases it. There from `prepare` on."""
        assert self._held is not None, "prepare comes first"
        return self._held

    @property
    def leaving(self) -> tuple[str, ...]:
        """Names of the workers to which SIGTERM has come."""
        return tuple(link.name for link in self._links if link.is_leaving)

    @property
    def lines(self) -> int:
        """How many lines of other workers the chief has shown so far."""
        return self._output.lines

    def prepare(self) -> tuple[str, ...]:
        """Reaches every worker's machine, all at once, starts an agent for each worker, and checks what must hold.

        Before that, the folder under `sync` is brought to the machines.

        Returns:
            "host:port" of every worker's server, by the worker's index.

        Raises:
            ClusterError: with every fault of every machine: not reachable, versions that differ, no script, no port;
                or the run was ended meanwhile.
        """
        try:
            check_reach([worker.node.address for worker in self._workers])
            script = self._script_to_run()
            self._bring_folder()
            self._open_links()
            answers, own = self._inspect(script)
            self._require_not_stopped()
            file, digest = (script.file, script.digest) if script else (None, None)
            check_all(answers, replace(own, digest=digest), file)
        except BaseException:
            self.abort("the run could not be prepared")
            raise
        self._addresses = tuple(
            host_and_port(worker.node.address, answer.port)
            for worker, answer in zip(self._workers, answers.values(), strict=True)
            if isinstance(answer, Facts) and answer.port is not None
        )
        return self._addresses

    def start(self, payload: bytes) -> None:
        """Starts the script on every other worker, and watches from now on.

        Args:
            payload: reaches every worker as `WorkerClient.payload`.
        """
        script = self._script_to_run()
        environment = dict(script.environment) if script else {}
        on_preempt = self._spec.checkpoint is not None and self._spec.checkpoint.on_preempt
        with self._speaking:
            for worker, link in zip(self._workers[1:], self._links, strict=True):
                assert script is not None
                limits = self._spec.stop_timeout, self._spec.silence_timeout
                join = Membership(
                    worker.index, worker.name, self._addresses, payload, *limits, script.brought, on_preempt
                )
                link.send(Start(script.arguments, script.directory, environment, join))
            self._tell_all(*self._said)
            self._run()
        if self._links:
            threading.Thread(target=self._supervise, name="autodist-supervisor", daemon=True).start()

    def _run(self) -> None:
        with self._changed:
            self._require_not_stopped()
            self._phase = _Phase.RUNNING
            # What ended while nothing ran yet counts from now on.
            self._endings.extend(link.ending for link in self._links if link.ending)

    def say(self, text: str) -> None:
        """Tells every worker something that `WorkerClient.hear` gives, in order; also before `start`."""
        self._tell_members(Said(text))

    def wait_in_first_step(self) -> None:
        """The chief's script has come to its first step, and waits for the others from now on."""
        self._tell_members(Waiting())

    def require_on_their_way(self) -> None:
        """Passes while every worker's script may still come to its first step; called while the chief waits there.

        Raises:
            WorkerFailedError: one has ended.
        """
        with self._changed:
            for link in self._links:
                if link.done and self._is_running:
                    reason = (
                        f"has ended its script before its first step, in which {self._workers[0].name} waits for it"
                    )
                    self._endings.append(Ending(link.name, f"{reason}. {SAME_STEPS}", link.last_lines))
                    self._changed.notify_all()
        self.check()

    def finish(self) -> None:
        """The chief's script has ended well: waits until all workers are done, then lets all of them end.

        Once a worker has said that it is done, only an exit status that its script chooses counts as a failure: if its
        process takes long to end, or dies of a signal, the log says so.

        Raises:
            WorkerFailedError: a worker ended badly, or with an exit status that its script chose.
        """
        if self._phase is _Phase.PREPARING:
            self.abort("nothing was started")
        if self._is_over():
            return
        with self._changed:
            self._changed.wait_for(lambda: self._endings or all(link.done for link in self._links))
            if not self._endings:
                self._phase = _Phase.RELEASED
                self._changed.notify_all()
        if self._phase is not _Phase.RELEASED:
            cause = self.first_cause(_CAUSE_LIMIT)
            self.abort("a worker ended badly")
            assert cause is not None
            raise cause
        self._release()

    def abort(self, reason: str, is_failure: bool = True) -> None:
        """Stops all workers now; returns within 10 s, when they are gone. Again, or after `finish`: nothing happens.

        Args:
            reason: for the log.
            is_failure: whether there is anything wrong.
        """
        if self._is_over():
            return
        # Where a worker has failed, the others are being stopped already, and the last word is the failure's.
        is_told = is_failure and self._cause is None
        _log.log(logging.INFO if is_told else logging.DEBUG, "stopping all workers: %s", reason)
        self._stop_all()

    def first_cause(self, timeout: float) -> WorkerFailedError | None:
        """Why the run failed, if a worker ended badly; waits for that for up to `timeout` seconds.

        The chief asks this when TensorFlow tells it that another worker has gone: that error names no cause.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._cause is not None, timeout)
            return self._cause

    def ask(self, limit: float, are_on_their_way: bool = False) -> dict[str, Progress | None] | None:
        """What the script of every other worker does, by the worker's name; None once the run is over.

        Args:
            limit: seconds after which a worker counts as one that does not answer, and has None.
            are_on_their_way: whether some may not have come to their first step, as in `Ask`.
        """
        with self._changed:
            for link in self._links:
                link.progress = None
        self._tell_all(Ask(are_on_their_way))
        with self._changed:
            self._changed.wait_for(lambda: not self._is_running or all(link.progress for link in self._links), limit)
            return {link.name: link.progress for link in self._links} if self._is_running else None

    def take_heard(self) -> set[str]:
        """Names of the workers whose agents have sent something since the last call, or send no heartbeats."""
        return {link.name for link in self._links if link.take_heard()}

    def wait_for_end(self, timeout: float) -> bool:
        """Waits until the run ends, well or badly, for `timeout` seconds, and says whether it has."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._is_running, timeout)

    def give_up(self, worker: str, reason: str, is_lost: bool = False) -> None:
        """Ends the run as if a worker had ended badly, or with `is_lost` as if the way to it had been lost."""
        with self._changed:
            if self._is_running:
                lines = next(link.last_lines for link in self._links if link.name == worker)
                self._endings.append(Ending(worker, reason, lines, is_lost))
                self._changed.notify_all()

    @property
    def _is_running(self) -> bool:
        return self._phase is _Phase.RUNNING and not self._endings

    def check(self) -> None:
        """Raises the failure of the run if there is one by now; `wait_until_listening` calls it between tries.

        Raises:
            WorkerFailedError: a worker has ended badly.
        """
        cause = self.first_cause(0)
        if cause is not None:
            raise cause

    def _is_over(self) -> bool:
        """Whether nothing is left to do: all was stopped or released, or this process was forked from the chief's."""
        return self._phase in (_Phase.RELEASED, _Phase.STOPPED) or os.getpid() != self._process

    def _script_to_run(self) -> Script | None:
        if self._script is None and len(self._workers) > 1:
            self._script = Script.of_this_process()
        return self._script

    def _bring_folder(self) -> None:
        if self._spec.sync is not None:
            from autodist.cluster.file_sync import (
                bring_to_all,  # here, so that paramiko is loaded where it is needed alone
            )

            bring_to_all(self._spec, lambda: self._phase is _Phase.STOPPED)

    def _open_links(self) -> None:
        for workers, channels in channels_to_agents(self._spec, self._environment):
            with self._changed:
                self._links += tuple(
                    WorkerConnection(
                        worker.name, channel, self._changed, self._output, self._note_ending, self._note_leaving,
                        shows=not self._spec.is_given,
                    )
                    for worker, channel in zip(workers, channels, strict=True)
                )  # fmt: skip
                is_stopped = self._phase is _Phase.STOPPED
            if is_stopped:
                self._close()
            self._require_not_stopped()

    def _require_not_stopped(self) -> None:
        if self._phase is _Phase.STOPPED:
            raise ClusterError("the run was ended before its workers were started")

    def _inspect(self, script: Script | None) -> tuple[dict[str, Facts | Lost], Facts]:
        """The facts of every worker's machine, by the worker's name, and those of the chief's own."""
        file, directory = (script.file, script.directory) if script else (None, os.getcwd())
        hosts = tuple(dict.fromkeys(worker.node.address for worker in self._workers))
        asks = [Inspect(file, directory, worker.port, compared_packages(), hosts) for worker in self._workers]
        for link, ask in zip(self._links, asks[1:], strict=True):
            link.send(ask)
        own, self._held = find_facts(asks[0])
        with self._changed:
            limit = self._spec.reach_timeout
            if any(self._spec.ssh_group(worker.node) is not None for worker in self._workers):
                limit += self._spec.connect_timeout  # it may be booting
            self._wait_for_answers(limit)
            late = Lost(
                f"no answer within {limit:g} s; see whether the machine is up and not overloaded, or raise "
                "`reach_timeout`",
                is_away=True,
            )
            return {self._workers[0].name: own} | {link.name: link.answer or late for link in self._links}, own

    def _wait_for_answers(self, limit: float) -> None:
        """Waits until all machines have answered, and tells once which of them have not when that takes long."""

        def is_over() -> bool:
            return all(link.answer for link in self._links) or self._phase is _Phase.STOPPED

        if limit > _TELLS_AFTER and not wait_for(self._changed, is_over, _TELLS_AFTER):
            late = ", ".join(link.name for link in self._links if not link.answer)
            _log.info("%s: no answer yet; waiting for up to %g s, in case the machine is still booting", late, limit)
            limit -= _TELLS_AFTER
        wait_for(self._changed, is_over, limit)

    def _note_ending(self, link: WorkerConnection) -> None:
        assert link.ending is not None
        if self._phase is _Phase.RUNNING:
            self._endings.append(link.ending)
        elif self._phase is _Phase.RELEASED and link.status != 0:
            if link.status is not None and link.status > 0 and link.status != _NOT_FLUSHED:
                self._endings.append(link.ending)
            else:
                _log.warning("%s was done; then its process %s.", link.name, link.ending.reason)

    def _note_leaving(self, worker: str) -> None:
        self.on_leaving(worker)

    def _supervise(self) -> None:
        """Waits for the first bad ending while the chief's script runs, and acts on it."""
        with self._changed:
            self._changed.wait_for(lambda: self._endings or self._phase is not _Phase.RUNNING)
            if not self._endings or self._phase is _Phase.RELEASED:
                return
            self._collect()
            cause = choose_cause(self._endings).error()
        self._output.drain(_SHOWN_LIMIT)  # the cause is told below what the worker has printed
        with self._changed:
            self._cause = cause
            self._changed.notify_all()
        self._tell_all(Stop())
        self._on_failure(self._cause)

    def _collect(self) -> None:
        """Waits a moment for other endings of the same cause, unless the first is one that no other one causes."""
        began = time.monotonic()
        self._changed.wait_for(
            lambda: choose_cause(self._endings).is_lost or len(self._endings) == len(self._links), _COLLECT
        )
        rest = began + _COLLECT_ECHOES - time.monotonic()
        self._changed.wait_for(
            lambda: not choose_cause(self._endings).is_echo or len(self._endings) == len(self._links), rest
        )

    def _release(self) -> None:
        """Lets all workers end, and waits until their processes have."""
        self._tell_all(Release())
        try:
            late = self._wait_for_processes()
        except BaseException:  # Ctrl-C
            self._stop_all()
            raise
        if late:
            _log.warning(
                "%s: the script is done, but its process did not end within %g s, and is stopped. Raise `end_timeout` "
                "if its exit handlers need longer.", ", ".join(late), self._spec.end_timeout,
            )  # fmt: skip
            self._stop_all()
        else:
            self._close(shown_limit=self._spec.end_timeout)
        if self._endings:
            raise choose_cause(self._endings).error()

    def _wait_for_processes(self) -> list[str]:
        """Waits until the processes of released workers have ended, and names those that have not in time."""

        def late() -> list[str]:
            return [link.name for link in self._links if not link.ending]

        limit = self._spec.end_timeout
        with self._changed:
            if limit > _TELLS_AFTER and not wait_for(self._changed, lambda: not late(), _TELLS_AFTER):
                _log.info(
                    "%s: the script is done, its process (exit handlers, threads) is not; waiting for up to %g s.",
                    ", ".join(late()), limit,
                )  # fmt: skip
                limit -= _TELLS_AFTER
            wait_for(self._changed, lambda: not late(), limit)
            return late()

    def _tell_all(self, *messages: Message) -> None:
        for link in self._links:
            for message in messages:
                link.send(message)

    def _tell_members(self, message: Message) -> None:
        with self._speaking:
            if self._phase is _Phase.PREPARING:
                self._said.append(message)
            else:
                self._tell_all(message)

    def _stop_all(self) -> None:
        """Stops all workers, and returns when they are gone."""
        with self._changed:
            self._phase = _Phase.STOPPED
            self._changed.notify_all()
        self._tell_all(Stop())
        self._close()

    def _close(self, shown_limit: float = _SHOWN_LIMIT) -> None:
        """Waits until all agents have ended, for some seconds, ends what is left on this machine, and shows all."""
        stopwatch, limit = Stopwatch(), self._spec.stop_timeout + _STOP_LIMIT
        for link in self._links:
            while not link.wait(LOOK_INTERVAL) and stopwatch.read() < limit:
                pass
            link.close()
        if self._held is not None:
            self._held.release()
        self._output.drain(shown_limit)
