"""Connects a process, other than the chief, to the chief of its given cluster."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, MutableMapping
from dataclasses import replace
from typing import TypeVar

from autodist.cluster.environments.handshake import (
    MAX_LINE,
    Challenge,
    Hello,
    Refused,
    RefusedError,
    Welcome,
    decode,
    is_welcome,
    nonce,
    prove,
)
from autodist.cluster.environments.launcher_env import GivenCluster
from autodist.cluster.environments.local_facts import hello_of
from autodist.cluster.environments.secret import SecretSource
from autodist.cluster.protocol import encode
from autodist.cluster.timeouts import Stopwatch
from autodist.errors import ClusterError
from autodist.logs.terminal import print_message

_RETRY_INTERVAL, _MESSAGE_LIMIT = 0.5, 10.0

# Number of refused secrets after which this process gives up; at first, the file may hold an earlier run's secret.
_TRIES = 3

_Expected = TypeVar("_Expected", Challenge, Welcome)


def connect(
    given: GivenCluster, environment: MutableMapping[str, str], join_timeout: float, count_gpus: Callable[[], int]
) -> tuple[socket.socket, Welcome]:
    """Connects to the chief, and joins the run; returns the connection, and the last message of the handshake.

    Args:
        given: the cluster of this process.
        environment: its environment variables; AUTODIST_SECRET is removed.
        join_timeout: seconds within which it must join the run.
        count_gpus: returns the number of GPUs that its TensorFlow sees; called if there are any.

    Raises:
        RefusedError: the chief refuses this process.
        ClusterError: the chief did not answer in time, or the chief there has all processes of its run. This may be an
            earlier run of a job that was requeued, so the process waits for its end.
        ResourceSpecError: there is no secret.
    """
    source = SecretSource.find(given, environment)
    hello = hello_of(given, environment, count_gpus)
    stopwatch, refusals, problem = Stopwatch(_MESSAGE_LIMIT), _Refusals(given, source), "nothing listens there"
    print_message(f"{given.form}: process {given.index} joins the chief at {given.chief}, port {given.port}")
    while stopwatch.read() < join_timeout:
        try:
            return _join_once(given, hello, source)
        except FileNotFoundError as error:
            problem = (
                f"the chief's file {error.filename} with the secret does not exist here: is the home directory "
                "shared? If not, set AUTODIST_SECRET for all processes"
            )
        except RefusedError as error:
            refusals.check(error)
            problem = f"it refuses this process: {error}"
        except OSError as error:
            problem = error.strerror or str(error)
        time.sleep(_RETRY_INTERVAL)
    raise ClusterError(
        f"Process {given.index} found no chief at {given.chief}, port {given.port}, within {join_timeout:g} s "
        f"({problem}). Check that process 0 runs there and still waits for others, and that no firewall is in between."
    )


class _Refusals:
    """The refusals of one process.

    Args:
        given: its cluster.
        source: source of its secret.
    """

    def __init__(self, given: GivenCluster, source: SecretSource) -> None:
        self._given, self._source = given, source
        self._secret: bytes | None = None
        self._count = 0
        self._has_printed = False

    def check(self, error: RefusedError) -> None:
        """Returns if the chief may accept the process later: it is that of an earlier run, or its secret is new.

        Raises:
            RefusedError: the refusal is final.
        """
        if error.is_complete:
            if not self._has_printed:
                print_message(
                    f"the chief there has all processes of its run, perhaps an earlier one, and refuses this one: "
                    f"{error}; waiting until that run has ended"
                )
            self._has_printed = True
            return
        before, self._secret = self._secret, _read_if_there(self._source)
        self._count += 1
        is_last = self._count == _TRIES or self._source.text is not None or before == self._secret
        if not error.is_secret or is_last:
            given = self._given
            raise RefusedError(
                f"The chief at {given.chief}, port {given.port}, refuses process {given.index}: {error}.",
                error.is_secret,
            )


def _read_if_there(source: SecretSource) -> bytes | None:
    try:
        return source.read()
    except FileNotFoundError:
        return None


def _join_once(given: GivenCluster, hello: Hello, source: SecretSource) -> tuple[socket.socket, Welcome]:
    connection = socket.create_connection((given.chief, given.port), timeout=_MESSAGE_LIMIT)
    try:
        lines = connection.makefile("rb", buffering=0)
        hello = replace(hello, nonce=nonce())
        connection.sendall(encode(hello))
        challenge = _expect(lines.readline(MAX_LINE), Challenge)
        secret = source.read()  # not earlier: the chief writes the file before it listens
        connection.sendall(encode(prove(secret, hello, challenge)))
        answer = _expect(lines.readline(MAX_LINE), Welcome)
        if not is_welcome(secret, hello, challenge, answer):
            raise RefusedError(
                "the process that listens there does not know the secret: it is not this run's chief", True
            )
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection, answer
    except BaseException:
        connection.close()
        raise


def _expect(line: bytes, kind: type[_Expected]) -> _Expected:
    if not line:
        raise OSError("it closed the connection")
    message = decode(line)
    if isinstance(message, Refused):
        raise RefusedError(message.problem, message.is_secret, message.is_complete)
    if not isinstance(message, kind):
        raise RefusedError("it sent an unexpected message")
    return message
