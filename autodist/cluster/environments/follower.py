"""A follower: a process of a given cluster that is not the chief; it joins, and is then the agent of its worker.

`python -m autodist.cluster.environments.follower` reads its `FollowerOrder` from AUTODIST_FOLLOWS. It
connects to the chief, shows that it knows the secret, and starts the script when it is told to. What the script prints
it prints too, for the scheduler, and tells the chief, who shows the last lines of a worker that failed. It ends as the
script does; with a bad exit status, too, where the chief was lost, or nothing was started: 2 where the chief refuses
it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import MutableMapping
from dataclasses import dataclass, replace
from types import FrameType
from typing import NoReturn, TypeVar

from pydantic import TypeAdapter

from autodist.cluster.agent import Agent
from autodist.cluster.environments.handshake import (
    LONGEST_LINE,
    Challenge,
    Hello,
    Refused,
    RefusedError,
    Welcome,
    decode,
    encode,
    is_welcome,
    nonce,
    prove,
)
from autodist.cluster.environments.launcher_env import Given
from autodist.cluster.environments.local_facts import count_gpus_apart, hello_of
from autodist.cluster.environments.secret import SecretSource
from autodist.cluster.load_adjusted_clock import Stopwatch
from autodist.cluster.protocol import Exited, Inspect, Line, Lost, Message, Release, Start, Stop
from autodist.cluster.script import Script
from autodist.errors import BAD_INPUT, AutoDistError, ClusterError, ResourceSpecError

VARIABLE = "AUTODIST_FOLLOWS"
"""Environment variable by which this process is told what it is, as JSON."""

_RETRY_INTERVAL, _WORD_LIMIT, _HANG_UP_LIMIT = 0.5, 10.0, 2.0

# With a secret that was refused, after which this process gives up; one in a file may be an earlier run's.
_TRIES = 3

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

_Word = TypeVar("_Word", Challenge, Welcome)


@dataclass(frozen=True)
class FollowerOrder:
    """What a follower is told.

    Attributes:
        given: what it knows of its cluster.
        script: that it runs.
        join_timeout: seconds until it has joined the chief.
    """

    given: Given
    script: Script
    join_timeout: float


_ORDERS = TypeAdapter(FollowerOrder)


def follow(order: FollowerOrder) -> NoReturn:
    """Turns this process into a follower, in place of what it runs.

    Not beside it: what the process would do afterwards is the script's, which the follower starts.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    environment = {**os.environ, VARIABLE: _ORDERS.dump_json(order).decode()}
    command = [sys.executable, "-P", "-m", "autodist.cluster.environments.follower"]
    os.execve(sys.executable, command, environment)


class Follower(Agent):
    """The agent of a worker whose process a scheduler has started.

    Args:
        connection: to the chief.
        script: that it runs.
        welcome: what the chief said.

    Attributes:
        status: exit status that this process is to have.
    """

    def __init__(self, connection: socket.socket, script: Script, welcome: Welcome) -> None:
        super().__init__(
            connection.makefile("rb"), connection.makefile("wb"), welcome.stop_timeout, welcome.silence_timeout
        )
        self._own = script
        self._released = self._told = self._lost_chief = False
        self._exited: int | None = None

    @property
    def status(self) -> int:
        if self._exited:
            return self._exited if self._exited > 0 else 128 - self._exited
        return 0 if self._exited == 0 and self._released else 1

    def end_by(self, number: int) -> None:
        """Ends the script, since this process was sent a signal; the chief is told so, as long as it listens.

        Of the first SIGTERM it is only told where it saves then.
        """
        name = signal.Signals(number).name
        if number == signal.SIGTERM and self.leave():
            self._say(f"this process was sent {name}; the chief is told, which saves what is trained and ends the run")
            return
        self._say(f"this process was sent {name}, and ends its script")
        problem = f"its process was sent {name}, by the scheduler or somebody on its machine"
        threading.Thread(target=self._leave, args=(problem,), name="autodist-leaving", daemon=True).start()

    def send(self, message: Message) -> None:
        if isinstance(message, Line):
            _print(message)
        if isinstance(message, Exited):
            self._exited = message.status
        if isinstance(message, Lost):
            self._say(message.problem)
        super().send(message)

    def say_how_it_ended(self) -> None:
        """Tells the user of this process's outputs why it ends, where nothing else has."""
        if self._told or self._released:
            return
        if self._exited is None:
            self._say("the chief ended before this process's script was started; see what the chief printed")
        elif self._lost_chief:
            self._say("the chief went away in the middle of the run, and the script was ended; see what it printed")

    def _leave(self, problem: str) -> None:
        super().send(Lost(problem))
        self._ended.set()

    def _listen(self) -> None:
        super()._listen()
        self._lost_chief = self._exited is None

    def _handle(self, message: Message) -> bool:
        match message:
            case Inspect():
                message = replace(message, script=self._own.file, directory=self._own.directory)
            case Start():
                message = replace(message, arguments=self._own.arguments, directory=self._own.directory)
            case Release():
                self._released = True
            case Stop() if not self._released:
                self._say("the chief ends the run; see what it printed")
            case Lost():
                self._say(message.problem)
                return False
        return super()._handle(message)

    def _say(self, text: str) -> None:
        self._told = True
        tell(text)


def join(order: FollowerOrder, environment: MutableMapping[str, str]) -> tuple[socket.socket, Welcome]:
    """Connects to the chief, and takes this process into the run.

    Raises:
        RefusedError: the chief does not take this process.
        ClusterError: it did not answer in time.
        ResourceSpecError: there is no secret.
    """
    given = order.given
    source = SecretSource.of(given, environment)
    hello = hello_of(given, environment, count_gpus_apart)
    stopwatch, refused, problem = Stopwatch(_WORD_LIMIT), 0, "nothing listens there"
    secret: bytes | None = None
    tell(f"{given.form}: process {given.index} joins the chief at {given.chief}, port {given.port}")
    while stopwatch.read() < order.join_timeout:
        try:
            return _join_once(given, hello, source)
        except FileNotFoundError as error:
            problem = (
                f"the secret, which the chief leaves in {error.filename}, is not there: is the home directory "
                "shared? Else set AUTODIST_SECRET for all processes"
            )
        except RefusedError as error:
            before, secret = secret, _read_if_there(source)
            refused += 1
            if not error.is_secret or refused == _TRIES or (source.text is not None) or (before == secret):
                raise RefusedError(
                    f"The chief at {given.chief}, port {given.port}, refuses process {given.index}: {error}.",
                    error.is_secret,
                ) from None
        except OSError as error:
            problem = error.strerror or str(error)
        time.sleep(_RETRY_INTERVAL)
    raise ClusterError(
        f"Process {given.index} found no chief at {given.chief}, port {given.port}, within {order.join_timeout:g} s "
        f"({problem}). See whether process 0 runs there and still waits for others, and whether a firewall is between."
    )


def _read_if_there(source: SecretSource) -> bytes | None:
    try:
        return source.read()
    except FileNotFoundError:
        return None


def _join_once(given: Given, hello: Hello, source: SecretSource) -> tuple[socket.socket, Welcome]:
    connection = socket.create_connection((given.chief, given.port), timeout=_WORD_LIMIT)
    try:
        lines = connection.makefile("rb", buffering=0)
        own = replace(hello, nonce=nonce())
        connection.sendall(encode(own))
        challenge = _expect(lines.readline(LONGEST_LINE), Challenge)
        secret = source.read()  # now: who listens has left it before
        connection.sendall(encode(prove(secret, own, challenge)))
        answer = _expect(lines.readline(LONGEST_LINE), Welcome)
        if not is_welcome(secret, own, challenge, answer):
            raise RefusedError("what listens there does not know the secret, and is not this run's chief", True)
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection, answer
    except BaseException:
        connection.close()
        raise


def _expect(line: bytes, kind: type[_Word]) -> _Word:
    if not line:
        raise OSError("it hung up")
    word = decode(line)
    if isinstance(word, Refused):
        raise RefusedError(word.problem, word.is_secret)
    if not isinstance(word, kind):
        raise RefusedError("it answers out of turn")
    return word


def _print(line: Line) -> None:
    """On this process's own outputs, which the scheduler keeps."""
    stream = getattr(sys, line.stream)
    with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
        stream.write(line.text + "\n")
        stream.flush()


def tell(text: str) -> None:
    """Says something on this process's standard error."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"autodist: {text}\n")
        sys.stderr.flush()


def main() -> int:
    order = _ORDERS.validate_json(os.environ.pop(VARIABLE))
    for number in _SIGNALS:  # process 1 of a container is not ended by what it does not handle
        signal.signal(number, _end)
    try:
        connection, welcome = join(order, os.environ)
    except AutoDistError as error:
        tell(f"error: {error}")
        return BAD_INPUT if isinstance(error, (RefusedError, ResourceSpecError)) else 1
    follower = Follower(connection, order.script, welcome)
    for number in _SIGNALS:
        signal.signal(number, lambda number, frame: follower.end_by(number))
    follower.serve()
    follower.say_how_it_ended()
    _hang_up(connection)
    return follower.status


def _end(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


def _hang_up(connection: socket.socket) -> None:
    """Ends the connection when the other end has read all: one that is closed over unread bytes loses what was sent."""
    with contextlib.suppress(OSError):
        connection.settimeout(_HANG_UP_LIMIT)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(1 << 16):
            pass


if __name__ == "__main__":
    sys.exit(main())
