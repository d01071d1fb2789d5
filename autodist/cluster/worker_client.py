"""A worker's side of the run, inside the script's process."""

from __future__ import annotations

import functools
import logging
import os
import queue
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType

from autodist.cluster.heartbeat_timeout import HeartbeatTimeout
from autodist.cluster.load_adjusted_clock import LOOK_INTERVAL, Stopwatch, wait_for
from autodist.cluster.ports import PortHeld
from autodist.cluster.protocol import (
    Ask,
    Doing,
    Done,
    Joined,
    Leaving,
    Membership,
    Message,
    Progress,
    Release,
    Said,
    Waiting,
    decode,
    encode,
)
from autodist.cluster.script_end import watch_script_end
from autodist.errors import ClusterError

_log = logging.getLogger("autodist.cluster")

CONTROL_VARIABLE = "AUTODIST_CONTROL"
"""Environment variable by which the agent hands two file descriptors to the script: control socket and held port."""

_TAKEN = "taken"


class WorkerClient:
    """This process's part in a run that a chief started.

    When the agent goes away without having released the member, or sends no heartbeat for `silence_timeout` (it may
    have been stopped), the member ends its process group: SIGTERM, then SIGKILL. (The guard does the same from outside,
    unless it was stopped too; a signal is needed, since the script may sit inside TensorFlow.)

    Attributes:
        index: of this worker.
        name: of this worker.
        addresses: of all workers' servers, as "host:port", by index.
        payload: what the chief passed to `Coordinator.start`.
        brought: what the chief's script runs that is in no file, as in `Script`.
        held: this worker's port; `start_server` releases it.
        progress: called, from a thread of the member, when the coordinator asks what the script does.
    """

    def __init__(self, control: socket.socket, held: PortHeld) -> None:
        self._control, self.held = control, held
        self._process = os.getpid()
        os.register_at_fork(after_in_child=self._leave_to_parent)
        self._lines = control.makefile("rb")
        join = decode(self._lines.readline())
        assert isinstance(join, Membership), "the agent's first message"
        self.index, self.name, self.addresses, self.payload = join.index, join.name, join.addresses, join.payload
        self._stop_timeout, self.brought = join.stop_timeout, join.brought
        self._silence = HeartbeatTimeout(join.silence_timeout)
        self._script_end = watch_script_end()
        self._script_end.run_handlers_on_termination()
        self._leaves = threading.Event()
        if join.on_preempt:
            threading.Thread(target=self._tell_that_it_leaves, name="autodist-leaving", daemon=True).start()
            self._script_end.heeds_termination = self._leave
        self._waiting = threading.Event()
        self._sending = threading.Lock()
        self._ending, self._ended = threading.Lock(), threading.Event()
        self._said: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._chief_waits = threading.Event()
        self._holds_for = 0.0
        began = time.monotonic()
        self.progress: Callable[[], Progress] = lambda: Progress.of_this_process(Doing.ELSE, began)
        self._send(Joined())
        threading.Thread(target=self._listen, name="autodist-member", daemon=True).start()
        threading.Thread(target=self._heed_silence, name="autodist-silence", daemon=True).start()

    @staticmethod
    def from_environment() -> WorkerClient | None:
        """This process's member; None in the process that the user started, which is the chief. One per process.

        Raises:
            ClusterError: the process was started by a worker's script, and would take part a second time.
        """
        return _member()

    def hear(self) -> str | None:
        """Waits for what the chief says next by `Coordinator.say`; None once it has come to its first step."""
        said = self._said.get()
        if said is None:
            self._said.put(None)
        return said

    def wait_for_chief(self) -> None:
        """Returns once the chief's script has come to its first step; it may take its time."""
        self._chief_waits.wait()

    def let_chief_fail_first(self, limit: float) -> None:
        """Lets the chief be the first to tell an error that its script has as well as this one, before its first step.

        From now on what ends this worker's script badly before the chief has come to its first step is told here, and
        to the chief, only after a wait. In that time the chief, as a rule, fails by the same, tells it once, and stops
        this worker.

        Args:
            limit: the wait, in seconds.
        """
        self._holds_for, is_set = limit, self._holds_for > 0
        if is_set:
            return
        hook = sys.excepthook

        def tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            self.hold()
            hook(kind, error, trace)

        sys.excepthook = tell

    def hold(self) -> None:
        """Waits as `let_chief_fail_first` says; this worker may be stopped meanwhile."""
        if self._script_end.is_terminated:
            return
        stopwatch = Stopwatch()
        while os.getpid() == self._process and not self._ended.is_set() and stopwatch.read() < self._holds_for:
            if self._chief_waits.wait(min(LOOK_INTERVAL, self._holds_for)):
                return
        self._holds_for = 0.0

    def wait_for_end(self) -> None:
        """Reports that this worker's script ended well and returns when all have; call it when the script ends.

        Others may still need this worker's server until then. Returns at once if the script ends badly (its exit status
        is what is reported then), when the chief goes away, and in a process that was forked from the worker's.
        """
        if self._script_end.is_bad or os.getpid() != self._process:
            return
        self._waiting.set()
        self._send(Done())
        self._ended.wait()

    def wait_to_be_ended(self, limit: float) -> None:
        """Returns after `limit` seconds, or when the agent has gone; this worker may be stopped before."""
        self._ended.wait(limit)

    def _leave(self) -> bool:
        """Has the chief told that SIGTERM has come, unless the agent sent it or it is a second one; says whether."""
        if self._leaves.is_set() or not self._is_wanted():
            return False
        self._leaves.set()
        return True

    def _is_wanted(self) -> bool:
        """Whether the agent has not shut down its side of the control socket.

        Where it ends the script it does that first, which is known here before the SIGTERM of its guard comes.
        """
        poll = select.poll()
        poll.register(self._control, select.POLLRDHUP)
        return not poll.poll(0)

    def _wait_while_agent_is_there(self) -> None:
        """Returns when the agent has closed its end; where it only has no more to say, its guard ends this process."""
        poll = select.poll()
        poll.register(self._control, 0)  # that the other end was closed is told without asking
        poll.poll()

    def _tell_that_it_leaves(self) -> None:
        """In a thread: a signal may come while its own thread sends something else."""
        self._leaves.wait()
        self._send(Leaving())

    def _leave_to_parent(self) -> None:
        """In a process forked from this one: the agent must see the end of the worker's own process."""
        if self._control.fileno() >= 0:
            os.close(self._control.detach())  # not `close`, which leaves it open for the file made of it

    def _send(self, message: Message) -> None:
        try:
            with self._sending:
                self._control.sendall(encode(message))
        except OSError:
            return  # the agent is gone; the listening thread sees it as well and acts

    def _listen(self) -> None:
        released = False
        try:
            for line in self._lines:
                self._silence.heard()
                match decode(line):
                    case Ask():
                        self._send(self.progress())
                    case Said(text):
                        self._said.put(text)
                    case Waiting():
                        self._said.put(None)
                        self._chief_waits.set()
                    case Release():
                        released = True
                        break
        except OSError:
            released = False
        if not released:
            self._wait_while_agent_is_there()
        self._end(released)

    def _heed_silence(self) -> None:
        """Ends the script when its agent sends nothing for too long."""
        while not self._ended.wait(self._silence.look_interval):
            if self._silence.is_too_long():
                # In a thread: the agent reads what is printed here, and a pipe that it leaves full blocks.
                threading.Thread(target=self._report_silence, name="autodist-silent-agent", daemon=True).start()
                self._end(released=False)

    def _report_silence(self) -> None:
        _log.warning(
            "%s: its agent on this machine has sent nothing for %g s, so that the script ends; see whether the agent's "
            "process was stopped.", self.name, self._silence.limit,
        )  # fmt: skip

    def _end(self, released: bool) -> None:
        with self._ending:
            is_first = not self._ended.is_set()
            self._ended.set()
        if is_first and not released and not self._waiting.is_set():
            _end_own_group(self._stop_timeout)


def _end_own_group(stop_timeout: float) -> None:
    os.killpg(0, signal.SIGTERM)
    never = threading.Condition()
    with never:
        wait_for(never, lambda: False, stop_timeout)
    os.killpg(0, signal.SIGKILL)


@functools.cache
def _member() -> WorkerClient | None:
    handed = os.environ.get(CONTROL_VARIABLE)
    if handed is None:
        return None
    if handed == _TAKEN:
        raise ClusterError(
            "AutoDist is used in a process that a worker's script started, and would start a second run there. "
            'Put the part of the script that trains under `if __name__ == "__main__":`, '
            "so that processes which only import the script (as those of `multiprocessing` do) leave it out."
        )
    # Processes that the script starts must neither inherit the descriptors nor take themselves for the worker.
    os.environ[CONTROL_VARIABLE] = _TAKEN
    control_fd, port_fd = (int(number) for number in handed.split(","))
    for number in (control_fd, port_fd):
        os.set_inheritable(number, False)
    return WorkerClient(socket.socket(fileno=control_fd), PortHeld(socket.socket(fileno=port_fd)))
