"""Peers: the other workers of a run, as this one sees them from the first step to the end of the script."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from typing import Any, NoReturn

import tensorflow as tf

from autodist.cluster.protocol import Doing, Progress
from autodist.cluster.servers import start_server, wait_until_listening
from autodist.cluster.stalls import Limits, StallWatch
from autodist.cluster.worker_client import WorkerClient
from autodist.errors import ClusterError, WorkerFailedError
from autodist.resources import ResourceSpec
from autodist.runs.startup_progress import StartupProgress
from autodist.runs.worker_launch import WorkerLaunch, some_of
from autodist.runtime.interruptible import InterruptibleExecutor

log = logging.getLogger("autodist")

# What TensorFlow raises in the workers that are left when one goes away, or when the session is closed under a run.
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

# Of these, what it raises as a rule where another worker is gone, and hardly ever for a reason of the script's.
_ECHOES = (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError)

# Seconds in which the coordinator, told that a worker is lost, has seen to it; only a halted process exceeds it.
_CAUSE_LIMIT = 60.0

_joined: list[Peers] = []
"""What this process has joined."""


class Peers:
    """The chief starts the others and watches over them; each worker runs a server of its own that the others reach.

    With a single worker `guard` is a plain call.

    Args:
        spec: the machines.
        member: the link to the agent that started this process; None on the chief.
        payload: what the chief tells those that it starts.
        seed: of the run.
        start_up: shows how far the start is.

    Attributes:
        apart: on another worker, its call and the chief's, where the two came to different calls before all had joined;
            "" stands for a step. None: they have not.
        failure: of another worker, once the chief knows of it.
        is_told: whether the script has seen that failure raised.
        on_leaving: called, on the chief, with the name of a worker to which SIGTERM has come; from another thread.
    """

    def __init__(
        self, spec: ResourceSpec, member: WorkerClient | None, payload: bytes, seed: int, start_up: StartupProgress
    ) -> None:
        self._spec, self._member, self._payload, self._start_up = spec, member, payload, start_up
        self._seed = seed
        self._starting: WorkerLaunch | None = None
        if member is not None:
            member.let_chief_fail_first(spec.cause_timeout)
        self._caller: InterruptibleExecutor | None = None
        self._joins_since: float | None = None
        self._ended_at: float | None = None
        self.apart: tuple[str, str] | None = None
        self.failure: WorkerFailedError | None = None
        self.on_leaving: Callable[[str], None] = lambda worker: None
        self._lines_before = 0
        self.is_told = False

    @property
    def have_joined(self) -> bool:
        """Whether there are other workers by now, which may wait for this one."""
        return self._caller is not None

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way that waits for another worker."""
        return self._caller is None or self._caller.is_idle

    def wait_until_idle(self, limit: float) -> None:
        """Returns when nothing is under way that waits for another worker, or after `limit` seconds."""
        if self._caller is not None:
            self._caller.wait_until_idle(limit)

    @property
    def fault(self) -> ClusterError | None:
        """On the chief, what the run was lost by, where that was no doing of this process."""
        if self._starting is None:
            return None
        return self.failure or self._starting.fault

    @property
    def leaving(self) -> tuple[str, ...]:
        """On the chief, names of the workers to which SIGTERM has come."""
        return () if self._starting is None else self._starting.coordinator.leaving

    def begin(self) -> None:
        """On the chief, begins to start the others, if there are any; the script goes on meanwhile."""
        if self._member is None and len(self._spec.workers) > 1 and not _joined and self._starting is None:
            under_way = WorkerLaunch.under_way(self._spec)
            self._starting = under_way or WorkerLaunch(self._spec, self._seed, self._payload, self._start_up)
            self._starting.on_failure = self._on_failure
            self._starting.coordinator.on_leaving = self._on_leaving

    def check(self) -> None:
        """Raises, in the chief's script, what has failed beside it before a step was made.

        Raises:
            ClusterError: the others could not be started.
            WorkerFailedError: one of them has ended badly.
        """
        if self._caller is None and self._starting is not None:
            self._starting.check()
            if self.failure is not None:
                raise self._as_told_last(self.failure)

    def say(self, what: str, text: str) -> None:
        """On the chief, tells the others what they `hear`, before all have joined.

        Args:
            what: is called, in which they hear it.
            text: is said.
        """
        self.begin()
        if self._starting is not None:
            self._starting.coordinator.say(json.dumps([what, text]))

    def hear(self, what: str) -> str | None:
        """On another worker, the text that the chief says in the same call; None: the chief is past that call."""
        assert self._member is not None, "the chief says it"
        said, text = json.loads(self._member.hear() or '["", ""]')
        if said == what:
            return str(text)
        self.apart = self.apart or (what, said)
        return None

    def note_unheard(self) -> None:
        """On another worker that joins, notes a call that the chief has spoken in and this script has not made."""
        assert self._member is not None, "the chief says it"
        unheard = self._member.hear()
        if unheard is not None:
            self.apart = self.apart or ("", json.loads(unheard)[0])

    def join(self, config: tf.compat.v1.ConfigProto) -> str:
        """Brings all workers together; returns the target for this one's session.

        Args:
            config: of this worker's server.

        Raises:
            ClusterError: a worker could not be started, or this process has joined others already.
            WorkerFailedError: a worker ended before its server listened.
        """
        if len(self._spec.workers) == 1:
            return ""
        if _joined:
            raise ClusterError(
                "a second AutoDist with several workers in one process: each worker has one server, which the first "
                "one uses. Keep the first AutoDist and open its scope() again."
            )
        _joined.append(self)
        self._caller = InterruptibleExecutor()
        self._server = self._start_others(config) if self._member is None else self._follow(self._member, config)
        return self._server.target

    def _start_others(self, config: tf.compat.v1.ConfigProto) -> tf.distribute.Server:
        self.begin()
        assert self._starting is not None, "there are others"
        self._starting.has_joined = True
        coordinator, others = self._starting.coordinator, some_of([worker.name for worker in self._spec.workers[1:]])
        with self._start_up.doing(f"starting {others}"):
            self._starting.wait()
        coordinator.wait_in_first_step()
        with self._start_up.doing(f"waiting for {others} to trace the step and join"):
            server = start_server(coordinator.addresses, 0, coordinator.held, config)
            self._joins_since = time.monotonic()
            limits = Limits(self._spec.stall_timeout, self._spec.answer_timeout, self._spec.deadlock_timeout)
            StallWatch(coordinator, self._spec.workers[0].name, self._progress, limits)
            # From now on, whenever they were started: the script may take its time to come to its first step.
            try:
                wait_until_listening(coordinator.addresses, self._spec.start_timeout, coordinator.require_on_their_way)
            except WorkerFailedError as failure:
                raise self._as_told_last(failure) from None
            finally:
                self._joins_since = None
        self._start_up.has_done("all %d workers have joined", len(self._spec.workers))
        return server

    def _follow(self, member: WorkerClient, config: tf.compat.v1.ConfigProto) -> tf.distribute.Server:
        member.progress = self._progress
        server = start_server(member.addresses, member.index, member.held, config)
        member.wait_for_chief()
        self.note_unheard()
        # Longer than the chief waits, who says which worker is late.
        wait_until_listening(member.addresses, self._spec.start_timeout + self._spec.cause_timeout)
        return server

    def _progress(self) -> Progress:
        """What this worker's script does."""
        if self._ended_at is not None:
            return Progress.of_this_process(Doing.DONE, self._ended_at)
        joins_since = self._joins_since
        if joins_since is not None:
            return Progress.of_this_process(Doing.JOINING, joins_since)
        assert self._caller is not None, "peers have joined"
        is_stepping, since = self._caller.state
        return Progress.of_this_process(Doing.STEPPING if is_stepping else Doing.ELSE, since)

    def _on_failure(self, failure: WorkerFailedError) -> None:
        self.failure = failure
        log.error("%s", failure.headline)  # the rest where the script ends, or where it looks at what it has caught
        self.fail(failure)

    def _on_leaving(self, worker: str) -> None:
        self.on_leaving(worker)

    def fail(self, error: BaseException) -> None:
        """Raises `error` in whatever waits for other workers, and in all that would."""
        if self._caller is not None:
            self._caller.fail(error)

    def lose(self, worker: str, reason: str) -> NoReturn:
        """On the chief, ends the run as if a worker had ended badly.

        Raises:
            WorkerFailedError: it.
        """
        assert self._starting is not None, "there are others"
        self._starting.coordinator.give_up(worker, reason)
        cause = self._starting.coordinator.first_cause(_CAUSE_LIMIT)
        assert cause is not None, "the coordinator finds one within seconds"
        raise self._as_told_last(cause)

    def give_up(self, worker: int, reason: str) -> None:
        """On the chief, ends the run as if a worker had ended badly, and waits for nothing; from any thread."""
        assert self._starting is not None, "there are others"
        self._starting.coordinator.give_up(self._spec.workers[worker].name, reason)

    def guard(self, call: Callable[..., Any], *args: Any) -> Any:
        """Calls what fails if another worker goes away; then raises why that worker went, not what it led to here.

        Raises:
            WorkerFailedError: another worker ended badly.
        """
        if self._caller is None:
            return call(*args)
        try:
            return self._caller.call(call, *args)
        except WorkerFailedError as failure:
            raise self._as_told_last(failure) from None
        except _GONE as error:
            cause = self.cause_of(error)
            if cause is not None:
                raise self._as_told_last(cause) from None
            raise

    def cause_of(self, error: BaseException) -> WorkerFailedError | None:
        """Which worker's end made something fail here, if that was the reason and can be known here."""
        if self._member is not None and isinstance(error, _ECHOES):
            # The chief knows which one, says so, and ends this worker, which has nothing to add.
            self._member.wait_to_be_ended(self._spec.cause_timeout)
        if self._starting is None or not isinstance(error, _GONE):
            return None
        return self.failure or self._starting.coordinator.first_cause(self._spec.cause_timeout)

    def _as_told_last(self, failure: WorkerFailedError) -> WorkerFailedError:
        """The failure without its traceback: its message is to be the last thing that the user reads."""
        self.is_told = True
        if self._starting is not None:
            self._lines_before = self._starting.coordinator.lines
        return failure.with_traceback(None)

    def abort(self, reason: str) -> None:
        """On the chief, ends the others at once; on another worker, waits for the chief to tell its failure first."""
        if self._member is not None and not self.have_joined:
            self._member.hold()
        if self._starting is None or (self._starting.has_joined and not self.have_joined):
            return  # another AutoDist's
        self._starting.abort(reason)
        is_last_word = self.have_joined or self.is_told
        if self.failure is not None and is_last_word and self._starting.coordinator.lines > self._lines_before:
            log.error("%s", self.failure)  # once more, below what other workers have printed since

    def finish(self) -> None:
        """Waits, on the chief, until the others have ended, and on these until the chief has.

        Raises:
            ClusterError: the others could not be started, which the script has not seen.
            WorkerFailedError: one has ended badly.
        """
        self._ended_at = time.monotonic()
        if self._member is not None:
            self._member.wait_for_end()
        elif self._starting is not None and self.have_joined:
            self._starting.coordinator.finish()
        elif self._starting is not None and not self._starting.has_joined:
            self._starting.abort("the script has ended without a step", is_failure=False)
            self._starting.check()
