"""Runs a follower: a process that a scheduler has started, other than the chief. It is the agent of its worker.

`python -m autodist.cluster.environments.follower` reads its `FollowerOrder` from AUTODIST_FOLLOWS. It connects to the
chief, proves that it knows the secret, and starts the script on request. It prints the script's output, for the
scheduler, and sends it to the chief, which shows the last lines of a worker that failed. Its exit status is that of the
script. It is 1 if the chief was lost or the script was not started, and 2 if the chief refuses the follower.

The follower of an elastic run stays when its script has ended, until the chief has decided if the run starts again; it
then joins that start. It may also wait for a start without a script; its status is 0 if the run ends well meanwhile,
and 1 if it fails.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import FrameType
from typing import NoReturn

from autodist.cluster.agent import Agent
from autodist.cluster.environments.connect import connect
from autodist.cluster.environments.handshake import RefusedError, Welcome
from autodist.cluster.environments.launcher_env import SECRET, GivenCluster
from autodist.cluster.environments.local_facts import count_gpus_apart
from autodist.cluster.protocol import (
    Exited,
    Heartbeat,
    Inspect,
    Line,
    Lost,
    Message,
    Notice,
    Release,
    Start,
    Stop,
)
from autodist.cluster.script import Script
from autodist.errors import BAD_INPUT, AutoDistError, ResourceSpecError
from autodist.json_record import JSONRecord
from autodist.logs.terminal import print_message
from autodist.waits import start_thread

VARIABLE = "AUTODIST_FOLLOWS"
"""Environment variable with the follower's order, as JSON."""

_HANG_UP_LIMIT = 2.0

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True)
class FollowerOrder(JSONRecord):
    """The settings of a follower.

    Attributes:
        given: its cluster, as read from the environment.
        script: the script that it runs.
        join_timeout: seconds within which it must join the run.
    """

    given: GivenCluster
    script: Script
    join_timeout: float


def follow(order: FollowerOrder) -> NoReturn:
    """Replaces this process by a follower, which starts the script again.

    It does not return: the process that the follower starts executes the rest of the script.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    environment = {**os.environ, VARIABLE: order.encode().decode()}
    command = [sys.executable, "-P", "-m", "autodist.cluster.environments.follower"]
    os.execve(sys.executable, command, environment)


class Follower(Agent):
    """The agent of a worker whose process a scheduler has started.

    Args:
        connection: connection to the chief.
        script: the script that it runs.
        welcome: the chief's last message of the handshake.

    Attributes:
        status: exit status for this process.
        starts_again: True if this process is to join another start of the run.
        was_used: True if the chief has sent something; a chief that ends just then may have accepted the connection.
    """

    def __init__(self, connection: socket.socket, script: Script, welcome: Welcome) -> None:
        super().__init__(
            connection.makefile("rb"), connection.makefile("wb"), welcome.stop_timeout, welcome.silence_timeout
        )
        self._script_to_run, self._is_elastic = script, welcome.is_elastic
        self._released = self._has_logged = self._lost_chief = self._is_spare = False
        self._exited: int | None = None
        self.starts_again = self.was_used = False

    @property
    def status(self) -> int:
        if self._is_spare:
            return 0
        if self._exited:
            return self._exited if self._exited > 0 else 128 - self._exited
        return 0 if self._exited == 0 and self._released else 1

    def end_by(self, number: int) -> None:
        """Ends the script after a signal to this process, and reports it to the chief.

        If the chief saves the run on preemption, the first SIGTERM is reported and does not end the script.
        """
        name = signal.Signals(number).name
        is_repeated = self._is_leaving
        if number == signal.SIGTERM and self.leave():
            if not is_repeated:
                self._log(f"this process was sent {name}; the chief saves the trained values and ends the run")
            return
        self._log(f"this process was sent {name}, and ends its script")
        problem = f"its process was sent {name}, by the scheduler or a user of its machine"
        start_thread("leaving", self._leave, problem)

    def send(self, message: Message) -> None:
        if isinstance(message, Line):
            _print(message)
        if isinstance(message, Exited):
            self._exited = message.status
        if isinstance(message, Lost):
            self._log(message.problem)
        super().send(message)

    def log_end(self) -> None:
        """Prints the reason for the end of this process, unless a reason was printed before."""
        if self._has_logged or self._released:
            return
        if self._exited is None:
            self._log("the chief ended before this process's script was started; see the chief's output")
        elif self._lost_chief:
            self._log("the chief went away in the middle of the run, and the script was ended; see the chief's output")

    def _leave(self, problem: str) -> None:
        super().send(Lost(problem, is_away=True))
        self._ended.set()

    def _listen(self) -> None:
        super()._listen()
        self._lost_chief = self._exited is None

    def _on_script_end(self) -> None:
        if self._released or not self._is_elastic:
            super()._on_script_end()

    def close(self) -> None:
        """Frees the port that is reserved for a start of the script."""
        if self._reserved_port is not None:
            self._reserved_port.release()

    def _handle(self, message: Message) -> bool:
        self.was_used = self.was_used or not isinstance(message, Heartbeat)
        match message:
            case Notice(text):
                print_message(text)
            case Stop(is_last=False) if self._is_elastic:
                self._log("the chief ends this start of the run; see the chief's output")
                if self._script is not None:
                    self._script.end()
                return True
            case Stop(starts_again=True) if not self._is_leaving:
                self.starts_again = True
                self._log("the run starts again, and this process joins it")
            case Stop(reason="") if self._is_elastic and self._script is None:
                self._is_spare = True
                self._log("the run has ended, and this process took no part since its last start")
            case Inspect():
                message = replace(message, script=self._script_to_run.file, directory=self._script_to_run.directory)
            case Start():
                message = replace(
                    message, arguments=self._script_to_run.arguments, directory=self._script_to_run.directory
                )
            case Release():
                self._released = True
            case Stop() if not self._released:
                self._log("the chief ends the run; see the chief's output")
            case Lost():
                self._log(message.problem)
                return False
        return super()._handle(message)

    def _log(self, text: str) -> None:
        self._has_logged = True
        print_message(text)


def _print(line: Line) -> None:
    """Prints a line of the script to this process's outputs, which the scheduler collects."""
    stream = getattr(sys, line.stream)
    with contextlib.suppress(OSError, ValueError):  # the output was closed
        stream.write(line.text + "\n")
        stream.flush()


def main() -> int:
    order = FollowerOrder.decode(os.environ.pop(VARIABLE))
    environment = dict(os.environ)
    os.environ.pop(SECRET, None)  # the script must not inherit it
    try:
        return _follow_starts(order, environment)
    except AutoDistError as error:
        print_message(f"error: {error}")
        return BAD_INPUT if isinstance(error, (RefusedError, ResourceSpecError)) else 1


def _follow_starts(order: FollowerOrder, environment: Mapping[str, str]) -> int:
    """Joins the start of the run, and further ones if the chief starts it again; returns the exit status.

    Raises:
        ClusterError, ResourceSpecError: as for `connect`.
    """
    ended: float | None = None
    while True:
        limit = order.join_timeout if ended is None else round(order.join_timeout - (time.monotonic() - ended), 1)
        follower = _follow_start(order, environment, limit)
        if follower.starts_again:
            ended = time.monotonic()
        elif ended is None or follower.was_used:
            return follower.status
        # Else the connection was one to the chief of the earlier start, which was about to end.


def _follow_start(order: FollowerOrder, environment: Mapping[str, str], limit: float) -> Follower:
    """Joins one start of the run within `limit` seconds, and returns at its end.

    Raises:
        ClusterError, ResourceSpecError: as for `connect`.
    """
    for number in _SIGNALS:  # process 1 of a container ignores signals that it does not handle
        signal.signal(number, _end)
    connection, welcome = connect(order.given, dict(environment), limit, count_gpus_apart)
    follower = Follower(connection, order.script, welcome)
    for number in _SIGNALS:
        signal.signal(number, lambda number, frame: follower.end_by(number))
    follower.serve()
    follower.log_end()
    _hang_up(connection)
    connection.close()
    follower.close()
    return follower


def _end(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


def _hang_up(connection: socket.socket) -> None:
    """Ends the outgoing stream, and reads until the chief closes the connection.

    A close with unread input would discard bytes that were sent but not yet received.
    """
    with contextlib.suppress(OSError):
        connection.settimeout(_HANG_UP_LIMIT)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(1 << 16):
            pass


if __name__ == "__main__":
    sys.exit(main())
