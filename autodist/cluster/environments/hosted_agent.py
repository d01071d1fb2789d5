"""The agent of a hosted function: it exchanges the chief's messages in threads of the function's own process."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import time
import traceback
from collections.abc import Callable
from dataclasses import replace

from autodist.cluster.agent import Agent, find_facts
from autodist.cluster.environments.handshake import Welcome
from autodist.cluster.failure import LAST_LINES
from autodist.cluster.hosted_function import HostedFunction
from autodist.cluster.ports import ReservedPort
from autodist.cluster.protocol import (
    Done,
    Exited,
    Inspect,
    Joined,
    Line,
    Lost,
    Membership,
    Message,
    Release,
    Start,
    Stop,
)
from autodist.cluster.worker_client import WorkerClient
from autodist.errors import ClusterError, WorkerFailedError
from autodist.logs.formatting import summary_of
from autodist.waits import start_thread, take

_HANG_UP_LIMIT = 5.0
"""Seconds for the last messages to the chief, and for the chief to close the connection."""


class HostedClient(WorkerClient):
    """The worker client of a function; its process goes on after the run, so a failure of the run raises an error.

    Args:
        membership: the chief's first message.
        reserved_port: the port of the worker's server.
        send: sends a message to the chief.
        note: called with the error that ends the run.
    """

    def __init__(
        self,
        membership: Membership,
        reserved_port: ReservedPort,
        send: Callable[[Message], None],
        note: Callable[[BaseException], None],
    ) -> None:
        super().__init__(membership, reserved_port)
        self._send_to_chief, self._note = send, note
        self._is_done = False
        self.began = time.monotonic()
        self._send(Joined())

    def wait_for_end(self) -> None:
        """Reports that the function has succeeded, and waits until all have.

        Raises:
            ClusterError: another worker has failed meanwhile.
        """
        self._is_done = True
        self._send(Done())
        self._ended.wait()
        self.check()

    def fail(self, failure: ClusterError) -> None:
        """Ends the run here: present and future calls that need other workers raise the failure."""
        if self._ended.is_set():
            return
        self.failure = failure
        self._note(failure)
        self._texts.put(None)
        self._chief_waits.set()
        self._ended.set()
        self.on_failure(failure)

    def release(self) -> None:
        """Ends the run here, without a failure."""
        self._ended.set()

    def stop(self, failure: ClusterError | None) -> None:
        """Ends the run here at the request of the chief; without a failure, it may only end before its last step."""
        if failure is None and self._is_done:
            self.release()
        else:
            self.fail(failure or ClusterError("The chief's function has ended, and makes no further step."))

    # -- as `LaunchedScript`, for the agent ------------------------------------------------------------------------

    def send_to_script(self, message: Message) -> None:
        self._receive(message)

    def is_stopped(self) -> bool:
        """Returns False: this code would not run."""
        return False

    def end(self) -> None:
        """Called when the connection to the chief has ended."""
        self.fail(
            ClusterError(
                "The chief was lost: its process has ended, or the connection to it broke. Its output may show why; if "
                "it still runs, check the network."
            )
        )

    def _send(self, message: Message) -> None:
        self._send_to_chief(message)


class HostedAgent(Agent):
    """The agent of a function, in its process.

    Args:
        connection: connection to the chief.
        welcome: the chief's last message of the handshake.
        function: the function.
    """

    def __init__(self, connection: socket.socket, welcome: Welcome, function: HostedFunction) -> None:
        self._connection, self._function = connection, function
        self._streams = connection.makefile("rb"), connection.makefile("wb")
        super().__init__(*self._streams, welcome.stop_timeout, welcome.silence_timeout)
        self._outcomes: queue.SimpleQueue[HostedClient | ClusterError] = queue.SimpleQueue()
        self._client: HostedClient | None = None
        self._serving = start_thread("hosted-agent", self.serve)

    def wait_for_start(self) -> HostedClient:
        """Returns the worker client, as soon as the chief starts the run.

        Raises:
            ClusterError: the run does not start; names the reason.
        """
        outcome = take(self._outcomes)
        if isinstance(outcome, ClusterError):
            raise outcome
        return outcome

    def serve(self) -> None:
        """Handles messages until the connection has ended or the chief has ended the run; then closes the connection.

        The function may go on: it may be in no call that needs other workers.
        """
        super().serve()
        self._outcomes.put(ClusterError("The chief ended before the run was started; see its output."))
        with contextlib.suppress(OSError):  # also ends threads that send or receive
            self._connection.shutdown(socket.SHUT_RDWR)
        for thread in (self._listener, self._heartbeat):
            if thread is not None:
                thread.join(_HANG_UP_LIMIT)
        for stream in self._streams:
            with contextlib.suppress(OSError):
                stream.close()
        self._connection.close()
        if self._reserved_port is not None:
            self._reserved_port.release()

    def end_function(self, error: BaseException | None) -> None:
        """Reports the end of the function to the chief, and returns when the connection is closed.

        Args:
            error: the function's error; None if it has succeeded.
        """
        if self._client is not None:
            self._client.release()
        if not self._ended.is_set():
            if error is not None:
                trace = "".join(traceback.format_exception(error)).splitlines()
                for line in trace[-LAST_LINES:]:
                    self.send(Line("stderr", line))
            self.send(Exited(int(error is not None), "" if error is None else f"raised {summary_of(error)}"))
            with contextlib.suppress(OSError):  # the chief closes the connection once it has read all
                self._connection.shutdown(socket.SHUT_WR)
            self._ended.wait(_HANG_UP_LIMIT)
            self._ended.set()
        self._serving.join(_HANG_UP_LIMIT)

    def _handle(self, message: Message) -> bool:
        match message:
            case Inspect():
                facts, self._reserved_port = find_facts(replace(message, script=None, directory=os.getcwd()))
                self.send(replace(facts, digest=self._function.script.digest))
                return True
            case Release() if self._client is not None:
                self._client.release()
                return True
            case Stop():
                self._stop(_error_of(message))
            case Lost():
                self._stop(ClusterError(message.problem))
                return False
        return super()._handle(message)

    def _start(self, start: Start) -> None:
        assert self._reserved_port is not None, "Facts with a port come before Start"
        self._script = self._client = HostedClient(
            start.membership, self._reserved_port, self.send, self._function.end.note
        )
        self._outcomes.put(self._client)

    def _stop(self, failure: ClusterError | None) -> None:
        if self._client is not None:
            self._client.stop(failure)
        elif failure is not None:
            self._outcomes.put(failure)


def _error_of(stop: Stop) -> ClusterError | None:
    if stop.worker:
        return WorkerFailedError(stop.worker, stop.reason, stop.last_lines)
    return ClusterError(f"The run has ended: {stop.reason}") if stop.reason else None
