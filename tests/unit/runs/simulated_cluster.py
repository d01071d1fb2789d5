"""Simulated cluster: mailboxes, queues and the coordinator of a run, without processes and servers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import tensorflow as tf

from autodist.errors import WorkerFailedError
from autodist.resources import ResourceSpec
from autodist.runs.peers import Peers
from autodist.runs.startup_progress import StartupProgress
from tests.unit.runs.scheduler import LAST_RESORT, Queue, Scheduler

WORKERS = 3

SPEC = ResourceSpec.from_dict({"nodes": [{"address": "localhost", "cpus": [0, 1, 2], "workers": WORKERS}]})
NAMES = [worker.name for worker in SPEC.workers]

_LOST = (
    "Socket closed\nAdditional GRPC error information from remote target /job:worker/replica:0/task:{} while calling "
    '/tensorflow.WorkerService/RecvTensor:\n:UNKNOWN:Error received from peer  {{grpc_status:14, grpc_message:"Socket '
    'closed"}}'
)


class Process:
    """The process of a worker.

    Args:
        cluster: all workers.
        index: index of the worker; 0 is the chief.

    Attributes:
        is_alive: True until the process has ended.
        was_killed: True if a fault of the test has ended it.
        is_done: True once its script has ended well.
        error: the error by which its script has ended; None if there is none.
        peers: its connections to the others.
    """

    def __init__(self, cluster: Cluster, index: int) -> None:
        self.cluster, self.scheduler, self.index = cluster, cluster.scheduler, index
        self.is_alive, self.was_killed, self.is_done = True, False, False
        self.error: BaseException | None = None
        self.peers = Peers(SPEC, None if index == 0 else self._client(), b"", 0, StartupProgress(is_chief=False))
        self.peers._executor = Executor(self.scheduler)
        if index == 0:
            self.peers._launch = SimpleNamespace(coordinator=cluster, has_joined=True, abort=cluster.abort)

    def _client(self) -> SimpleNamespace:
        """Returns this worker's connection to its agent."""
        return SimpleNamespace(
            index=self.index,
            let_chief_fail_first=lambda limit: None,
            wait_to_be_ended=lambda limit: self.scheduler.wait(lambda: False, "its end", LAST_RESORT),
            wait_for_end=self._wait_for_end,
        )

    def _wait_for_end(self) -> None:
        self.is_done = True
        self.scheduler.wait(lambda: self.cluster.is_released, "the end of the chief")

    def exit(self) -> None:
        """Ends the process at the end of its script."""
        self.is_alive = False
        if self.error is not None and self.index > 0:
            self.cluster.end_with_failure(NAMES[self.index], f"ended with {self.error!r}")
        self.scheduler.end(self)

    def kill(self) -> None:
        if self.is_alive:
            self.is_alive = False
            self.scheduler.end(self)


class Cluster:
    """The workers of one run and the coordinator, which ends them all after the first failure.

    Args:
        scheduler: runs all threads.

    Attributes:
        processes: the processes of the workers.
        cause: the first failure; None if there is none.
        chief_reason: the reason for which the chief has ended the run; None if it has not.
        is_released: True if the chief has ended the run well.
        mail: messages on their way, by sender and receiver.
    """

    lines, leaving = 0, ()

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.processes: list[Any] = []
        self.cause: WorkerFailedError | None = None
        self.chief_reason: str | None = None
        self.is_released = False
        self.mail: dict[tuple[int, int], Queue[bytes]] = defaultdict(lambda: Queue(scheduler))
        self._queues: dict[tuple[str, int, int], Queue[Any]] = defaultdict(lambda: Queue(scheduler, capacity=2))
        self._lost: set[tuple[int, int]] = set()
        self._endings: list[WorkerFailedError] = []
        scheduler.start("the coordinator", self._watch, self)

    @property
    def is_over(self) -> bool:
        return not any(process.is_alive for process in self.processes)

    def queue(self, name: str, source: int, to: int) -> Queue[Any]:
        """Returns the queue between two workers' steps."""
        return self._queues[name, source, to]

    def end_with_failure(self, worker: str, reason: str, is_lost: bool = False) -> None:
        if not self.is_released:
            self._endings.append(WorkerFailedError(worker, reason))

    def first_cause(self, timeout: float) -> WorkerFailedError | None:
        self.scheduler.wait(lambda: self.cause is not None, "the first cause", LAST_RESORT)
        return self.cause

    def abort(self, reason: str) -> None:
        """Ends the run for a reason of the chief."""
        self.chief_reason = self.chief_reason or reason

    def finish(self) -> None:
        """On the chief, waits until all others have ended.

        Raises:
            WorkerFailedError: one has failed.
        """
        self.scheduler.wait(
            lambda: self.cause is not None or all(other.is_done for other in self.processes[1:]), "the end of others"
        )
        if self.cause is not None:
            raise self.cause
        self.is_released = True

    # -- faults ----------------------------------------------------------------------------------------------------

    def kill(self, worker: int, kept: int) -> None:
        """Kills a worker; of its messages that have not arrived, the first `kept` arrive, from each link."""
        process = self.processes[worker]
        if process.is_alive and not self.is_released:
            process.was_killed = True
            process.kill()
            self.end_with_failure(NAMES[worker], "was ended by SIGKILL")
            for other in range(WORKERS):
                self.lose_link(worker, other, kept)

    def lose_link(self, source: int, to: int, kept: int) -> None:
        """Loses the messages from a worker to another one that have not arrived, except the first `kept`."""
        if not self.is_released:
            self._lost.add((source, to))
            self.mail[source, to].items = type(self.mail[source, to].items)(list(self.mail[source, to].items)[:kept])

    def is_lost(self, source: int, to: int) -> bool:
        return (source, to) in self._lost

    def _watch(self) -> None:
        """Ends all workers after the first failure, one after the other."""
        self.scheduler.wait(lambda: bool(self._endings) or self.chief_reason is not None, "a failure")
        chief, *others = self.processes
        if self.chief_reason is None:
            self.cause = self._endings[0]
            if chief.is_alive:
                chief.peers._on_failure(self.cause)
        for other in others:
            self.scheduler.hand_over()
            other.kill()


class Mailbox:
    """As `autodist.runtime.mailbox.Mailbox`, with a thread for each sender."""

    def __init__(self, process: Process) -> None:
        self._process, self._cluster, self._scheduler = process, process.cluster, process.scheduler
        self.on_loss: Callable[[BaseException], None] = lambda error: None
        self._receivers: list[Callable[[int, bytes], None]] = []
        self._is_closed = False

    def open_box(self, receive: Callable[[int, bytes], None]) -> Callable[[Sequence[int], bytes], None]:
        mark = bytes([len(self._receivers)])
        self._receivers.append(receive)

        def send(workers: Sequence[int], content: bytes) -> None:
            for to in workers:
                self._scheduler.hand_over()
                if not self._cluster.is_lost(self._process.index, to):
                    self._cluster.mail[self._process.index, to].put(mark + content)

        return send

    def start(self) -> None:
        index = self._process.index
        for source in range(1, WORKERS) if index == 0 else [0]:
            name, read = f"the mailbox of worker {index} for {source}", partial(self._read, source)
            self._scheduler.start(name, read, self._process, may_wait=False)

    def close(self) -> None:
        self._is_closed = True

    def _read(self, source: int) -> None:
        mail, to = self._cluster.mail[source, self._process.index], self._process.index
        while True:
            self._scheduler.wait(
                lambda: bool(mail.items) or self._is_closed or self._cluster.is_lost(source, to), "messages"
            )
            if self._is_closed:
                return
            if not mail.items:
                self.on_loss(tf.errors.UnavailableError(None, None, _LOST.format(source)))
                return
            message = self.take(source)
            self._receivers[message[0]](source, message[1:])

    def take(self, source: int) -> bytes:
        """Returns the next message of a sender."""
        return self._cluster.mail[source, self._process.index].items.popleft()


class Executor:
    """As `autodist.runtime.interruptible.InterruptibleExecutor`, in the thread of the caller."""

    is_idle = True

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._failure: BaseException | None = None

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        if self._failure is not None:
            raise self._failure
        task = self._scheduler.current
        before, task.interrupt = task.interrupt, lambda: self._failure
        try:
            return function(*arguments)
        finally:
            task.interrupt = before

    def fail(self, error: BaseException) -> None:
        self._failure = error
