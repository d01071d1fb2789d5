"""The worker client of a script's process, which an agent has started."""

from __future__ import annotations

import functools
import logging
import os
import select
import signal
import socket
import sys
import threading
from types import TracebackType

from autodist.cluster.ports import ReservedPort
from autodist.cluster.preemption_notice import PreemptionNotice
from autodist.cluster.protocol import Done, Joined, Leaving, Membership, Message, Release, decode, encode
from autodist.cluster.script_end import watch_script_end
from autodist.cluster.timeouts import HeartbeatTimeout, wait_for
from autodist.cluster.worker_client import WorkerClient
from autodist.errors import ClusterError
from autodist.waits import Condition, Event, start_thread

_log = logging.getLogger("autodist.cluster")

CONTROL_VARIABLE = "AUTODIST_CONTROL"
"""Environment variable with two file descriptors that the agent passes to the script: control socket and held port."""

_TAKEN = "taken"


class ScriptClient(WorkerClient):
    """The worker client of a script that an agent has started.

    The agent may end before it sends `Release`, or send no heartbeat for `silence_timeout` since it was stopped. Then
    the worker client ends its process group by SIGTERM, then SIGKILL. The guard does the same, unless it was stopped,
    too. Signals are needed, since the script may be blocked inside TensorFlow.

    Args:
        control: connection to the agent.
        reserved_port: the port of the worker's server.
    """

    def __init__(self, control: socket.socket, reserved_port: ReservedPort) -> None:
        self._control = control
        os.register_at_fork(after_in_child=self._leave_to_parent)
        self._lines = control.makefile("rb")
        self._script_end = watch_script_end()
        self._script_end.run_handlers_on_termination()
        membership = self._read_membership()
        super().__init__(membership, reserved_port)
        self._stop_timeout = membership.stop_timeout
        self._timeout = HeartbeatTimeout(membership.silence_timeout)
        self._is_leaving, self._notice = Event(), PreemptionNotice()
        if membership.on_preempt:
            start_thread("leaving", self._report_leaving)
            self._script_end.delays_termination = self._leave
        self._waiting = Event()
        self._sending = threading.Lock()
        self._ending = threading.Lock()
        self._send(Joined())
        start_thread("worker-client", self._listen)
        start_thread("silence", self._watch_timeout)

    def _read_membership(self) -> Membership:
        """Returns the agent's first message. A script that was started early waits for the chief's AutoDist here.

        Raises:
            ClusterError: the chief has ended the run before, without an agent that ends this process.
        """
        line = self._lines.readline()
        if not line:
            self._wait_while_agent_is_there()
            raise ClusterError("The chief ended the run before this worker's script joined it; see the chief's output.")
        membership = decode(line)
        assert isinstance(membership, Membership), "the agent's first message"
        return membership

    @staticmethod
    def from_environment() -> ScriptClient | None:
        """Returns the only worker client of this process; None in the chief, which the user started.

        Raises:
            ClusterError: a worker's script started this process, which would join the run a second time.
        """
        return _client()

    def let_chief_fail_first(self, limit: float) -> None:
        is_set = self._delay > 0
        super().let_chief_fail_first(limit)
        if is_set:
            return
        hook = sys.excepthook

        def print_later(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            self.wait_for_chief_to_fail()
            hook(kind, error, trace)

        sys.excepthook = print_later

    def wait_for_chief_to_fail(self) -> None:
        if not self._script_end.is_terminated:
            super().wait_for_chief_to_fail()

    def wait_for_end(self) -> None:
        """Reports that this worker's script succeeded, and waits until all have; call it when the script ends.

        Returns at once if the script has failed, since its exit status is then reported, or if the chief ends.
        """
        if self._script_end.is_bad or os.getpid() != self._process:
            return
        self._waiting.set()
        self._send(Done())
        self._ended.wait()

    def _leave(self) -> bool:
        """Reports SIGTERM to the chief, once; returns False for a second one, or if the agent sent SIGTERM."""
        if not self._is_kept_by_agent() or not self._notice.includes_this():
            return False
        self._is_leaving.set()
        return True

    def _is_kept_by_agent(self) -> bool:
        """Returns False if the agent has shut down its side of the control socket.

        The agent does this before it ends the script, so it is detected before the SIGTERM of the guard arrives.
        """
        poll = select.poll()
        poll.register(self._control, select.POLLRDHUP)
        return not poll.poll(0)

    def _wait_while_agent_is_there(self) -> None:
        """Waits until the agent has closed the socket; if it has only shut down its side, the guard ends it."""
        poll = select.poll()
        poll.register(self._control, 0)  # `poll` always reports that the other end was closed
        poll.poll()

    def _report_leaving(self) -> None:
        """Reports SIGTERM, in a thread: the signal may interrupt a thread that is sending."""
        self._is_leaving.wait()
        self._send(Leaving())

    def _leave_to_parent(self) -> None:
        """Closes the socket in a forked process: the agent must detect the end of the worker's own process."""
        if self._control.fileno() >= 0:
            os.close(self._control.detach())  # `close` would leave it open for `self._lines`

    def _send(self, message: Message) -> None:
        try:
            with self._sending:
                self._control.sendall(encode(message))
        except OSError:
            return  # the agent is gone, which the listening thread handles

    def _listen(self) -> None:
        released = False
        try:
            for line in self._lines:
                self._timeout.restart()
                message = decode(line)
                if isinstance(message, Release):
                    released = True
                    break
                self._receive(message)
        except OSError:
            released = False
        if not released:
            self._wait_while_agent_is_there()
        self._end(released)

    def _watch_timeout(self) -> None:
        """Ends the script if its agent sends no message within the timeout."""
        while not self._ended.wait(self._timeout.poll_interval):
            if self._timeout.has_expired() and self._is_kept_by_agent():  # else its guard ends the script
                # In a thread: the agent reads this process's output, and a full pipe blocks.
                start_thread("silent-agent", self._report_silence)
                self._end(released=False)

    def _report_silence(self) -> None:
        _log.warning(
            "%s: its agent on this machine has sent nothing for %g s, so the script ends; check that the agent's "
            "process was not stopped.", self.name, self._timeout.limit,
        )  # fmt: skip

    def _end(self, released: bool) -> None:
        with self._ending:
            is_first = not self._ended.is_set()
            self._ended.set()
        if is_first and not released and not self._waiting.is_set():
            _end_own_group(self._stop_timeout)


def _end_own_group(stop_timeout: float) -> None:
    os.killpg(0, signal.SIGTERM)
    never = Condition()
    with never:
        wait_for(never, lambda: False, stop_timeout)
    os.killpg(0, signal.SIGKILL)


@functools.cache
def _client() -> ScriptClient | None:
    descriptors = os.environ.get(CONTROL_VARIABLE)
    if descriptors is None:
        return None
    if descriptors == _TAKEN:
        raise ClusterError(
            "AutoDist is used in a process that a worker's script started, and would start a second run there. "
            'Put the part of the script that trains under `if __name__ == "__main__":`, '
            "so that processes which only import the script (as those of `multiprocessing` do) skip it."
        )
    # Processes that the script starts must neither inherit the descriptors nor act as the worker.
    os.environ[CONTROL_VARIABLE] = _TAKEN
    control_fd, port_fd = (int(number) for number in descriptors.split(","))
    for number in (control_fd, port_fd):
        os.set_inheritable(number, False)
    return ScriptClient(socket.socket(fileno=control_fd), ReservedPort(socket.socket(fileno=port_fd)))
