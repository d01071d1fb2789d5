"""The worker client: represents a worker, other than the chief, inside the process that trains."""

from __future__ import annotations

import os
import queue
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

from autodist.cluster.ports import ReservedPort
from autodist.cluster.protocol import ChiefText, ChiefWaits, Doing, Membership, Message, Progress, ProgressRequest
from autodist.cluster.timeouts import POLL_INTERVAL, Stopwatch
from autodist.errors import ClusterError
from autodist.waits import Event, take


class WorkerClient(ABC):
    """This process as a worker of a run that a chief started.

    Args:
        membership: the first message of the agent.
        reserved_port: the port of the worker's server.

    Attributes:
        index: index of this worker.
        name: name of this worker.
        addresses: addresses of all workers' servers, as "host:port", by index.
        payload: the bytes passed to `Coordinator.start`.
        pickled_code: pickled code that is in no file, as in `Script`.
        reserved_port: this worker's reserved port; `start_server` releases it.
        progress: called, from a thread of the worker client, when the coordinator requests the script's progress.
        failure: the error of a run that another worker has ended, if the process of this worker goes on; else None.
        on_failure: called once with that error, from a thread of the worker client.
    """

    def __init__(self, membership: Membership, reserved_port: ReservedPort) -> None:
        self.reserved_port = reserved_port
        self.index, self.name = membership.index, membership.name
        self.addresses, self.payload = membership.addresses, membership.payload
        self.pickled_code = membership.pickled_code
        self.failure: ClusterError | None = None
        self.on_failure: Callable[[ClusterError], None] = lambda failure: None
        self._process = os.getpid()
        self._ended = Event()
        self._texts: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._chief_waits = Event()
        self._delay = 0.0
        began = time.monotonic()
        self.progress: Callable[[], Progress] = lambda: Progress.of_this_process(Doing.ELSE, began)

    @abstractmethod
    def wait_for_end(self) -> None:
        """Reports that this worker succeeded, and waits until all have; call it when its script or function ends.

        Other workers may need this worker's server until then. Does nothing in a process that was forked from the
        worker's.
        """

    @abstractmethod
    def _send(self, message: Message) -> None:
        """Sends a message to the agent; if the agent is gone, another thread handles that."""

    def check(self) -> None:
        """Raises `failure`, if there is one.

        Raises:
            ClusterError: another worker has ended the run.
        """
        if self.failure is not None:
            raise self.failure

    def receive_text(self) -> str | None:
        """Waits for the next text sent by `Coordinator.say`; None after the chief has reached its first step.

        Raises:
            ClusterError: another worker has ended the run.
        """
        text = take(self._texts)
        if text is None:
            self._texts.put(None)
        self.check()
        return text

    def wait_for_chief(self) -> None:
        """Waits, without a timeout, until the chief's script has reached its first step.

        Raises:
            ClusterError: another worker has ended the run.
        """
        self._chief_waits.wait()
        self.check()

    def let_chief_fail_first(self, limit: float) -> None:
        """Delays errors of this script, so that the chief reports an error that all scripts have.

        The delay applies from now on, to an error that ends this worker's script before the chief has reached its first
        step. In that time, the chief usually fails with the same error, reports it once, and
        stops this worker.

        Args:
            limit: the delay in seconds.
        """
        self._delay = limit

    def wait_for_chief_to_fail(self) -> None:
        """Waits for the delay of `let_chief_fail_first`; this worker may be stopped meanwhile."""
        stopwatch = Stopwatch()
        while os.getpid() == self._process and not self._ended.is_set() and stopwatch.read() < self._delay:
            if self._chief_waits.wait(min(POLL_INTERVAL, self._delay)):
                return
        self._delay = 0.0

    def wait_to_be_ended(self, limit: float) -> None:
        """Returns after `limit` seconds, or when the run has ended; this worker may be stopped before."""
        self._ended.wait(limit)

    def _receive(self, message: Message) -> None:
        """Handles a message that reaches both kinds of worker client."""
        match message:
            case ProgressRequest():
                self._send(self.progress())
            case ChiefText(text):
                self._texts.put(text)
            case ChiefWaits():
                self._texts.put(None)
                self._chief_waits.set()
