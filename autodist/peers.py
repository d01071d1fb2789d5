"""Peers: the other workers of a run, as this one sees them from the first step to the end of the script."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from autodist.cluster.coordinator import Coordinator
from autodist.cluster.member import Member
from autodist.cluster.protocol import Doing, Progress
from autodist.cluster.servers import start_server, wait_until_listening
from autodist.cluster.stalls import Limits, StallWatch
from autodist.errors import ClusterError, WorkerFailedError
from autodist.resources import ResourceSpec
from autodist.runtime.caller import Caller
from autodist.start_up import StartUp

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

MOST_NAMES = 4
"""Of workers that are waited for, beside a spinner."""

_joined: list[Peers] = []
"""What this process has joined."""


class Peers:
    """The chief starts the others and watches over them; each worker runs a server of its own that the others reach.

    Where there is one worker, calls are calls and nothing else.

    Args:
        spec: the machines.
        member: this process's part, None on the chief.
        payload: makes what the chief tells those that it starts.
        start_up: is told how far that is.

    Attributes:
        failure: of another worker, once the chief knows of it.
        is_told: whether the script has seen that failure raised.
    """

    def __init__(
        self, spec: ResourceSpec, member: Member | None, payload: Callable[[], bytes], start_up: StartUp
    ) -> None:
        self._spec, self._member, self._payload, self._start_up = spec, member, payload, start_up
        self._coordinator: Coordinator | None = None
        self._caller: Caller | None = None
        self._ended_at: float | None = None
        self.failure: WorkerFailedError | None = None
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
        self._caller = Caller()
        self._server = self._start_others(config) if self._member is None else self._follow(self._member, config)
        return self._server.target

    def _start_others(self, config: tf.compat.v1.ConfigProto) -> tf.distribute.Server:
        self._coordinator = Coordinator(self._spec, self._on_failure)
        far = [node.address for node in self._spec.nodes if self._spec.ssh_group(node) is not None]
        with self._start_up.doing(f"reaching {len(far)} machines" if far else "making workers on this machine"):
            addresses = self._coordinator.prepare()
        if far:
            self._start_up.has_done("reached %s", ", ".join(far))
        self._coordinator.start(self._payload())
        names = [worker.name for worker in self._spec.workers[1:]]
        others = ", ".join(names) if len(names) <= MOST_NAMES else f"{len(names)} workers"
        with self._start_up.doing(f"waiting for {others} to trace the step and join"):
            server = start_server(addresses, 0, self._coordinator.held, config)
            wait_until_listening(addresses, self._spec.start_timeout, self._coordinator.check)
        self._start_up.has_done("all %d workers have joined", len(self._spec.workers))
        limits = Limits(self._spec.stall_timeout, self._spec.answer_timeout, self._spec.deadlock_timeout)
        StallWatch(self._coordinator, self._spec.workers[0].name, self._progress, limits)
        return server

    def _follow(self, member: Member, config: tf.compat.v1.ConfigProto) -> tf.distribute.Server:
        member.progress = self._progress
        server = start_server(member.addresses, member.index, member.held, config)
        wait_until_listening(member.addresses, self._spec.start_timeout)
        return server

    def _progress(self) -> Progress:
        """What this worker's script does."""
        if self._ended_at is not None:
            return Progress.of_this_process(Doing.DONE, self._ended_at)
        assert self._caller is not None, "peers have joined"
        is_stepping, since = self._caller.state
        return Progress.of_this_process(Doing.STEPPING if is_stepping else Doing.ELSE, since)

    def _on_failure(self, failure: WorkerFailedError) -> None:
        self.failure = failure
        log.error("%s", failure.headline)  # the rest where the script ends, or where it looks at what it has caught
        self.fail(failure)

    def fail(self, error: BaseException) -> None:
        """Raises `error` in whatever waits for other workers, and in all that would."""
        if self._caller is not None:
            self._caller.fail(error)

    def guard(self, call: Callable[..., Any], *args: Any) -> Any:
        """Calls what may fail because another worker went away; then the cause is raised, and not what followed.

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
        if self._coordinator is None or not isinstance(error, _GONE):
            return None
        return self.failure or self._coordinator.first_cause(self._spec.cause_timeout)

    def _as_told_last(self, failure: WorkerFailedError) -> WorkerFailedError:
        """For raising, without what it went through: its message is to be the last thing that the user reads."""
        self.is_told = True
        if self._coordinator is not None:
            self._lines_before = self._coordinator.lines
        return failure.with_traceback(None)

    def abort(self, reason: str) -> None:
        """On the chief, ends the others at once."""
        if self._coordinator is not None:
            self._coordinator.abort(reason)
            if self.failure is not None and self._coordinator.lines > self._lines_before:
                log.error("%s", self.failure)  # once more, below what other workers have printed since

    def finish(self) -> None:
        """Waits, on the chief, until the others have ended, and on these until the chief has."""
        self._ended_at = time.monotonic()
        if self._member is not None:
            self._member.wait_for_end()
        elif self._coordinator is not None:
            self._coordinator.finish()
