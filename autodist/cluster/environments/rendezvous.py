"""The rendezvous: the chief waits for the other processes of its cluster, and collects the machines."""

from __future__ import annotations

import atexit
import ipaddress
import logging
import os
import queue
import subprocess
from collections.abc import Collection, MutableMapping, Sequence

from autodist.cluster.environments.handshake import Hello
from autodist.cluster.environments.launcher_env import GivenCluster
from autodist.cluster.environments.machines import Machines, machines_of
from autodist.cluster.environments.roster import (
    Arrival,
    Failed,
    Listening,
    PortInUse,
    ProcessJoined,
    RendezvousOrder,
    Warned,
)
from autodist.cluster.environments.secret import SecretSource
from autodist.cluster.protocol import Lost, Message, decode, encode
from autodist.cluster.timeouts import POLL_INTERVAL, Stopwatch
from autodist.cluster.transport import Channel, start_relay
from autodist.errors import ClusterError
from autodist.resources import Timeouts, is_own_address
from autodist.waits import start_thread

_log = logging.getLogger("autodist.cluster")

# Seconds between log lines that name the missing processes.
_LOG_INTERVAL = 30.0

# Seconds for the rendezvous server to forward the last messages.
_CLOSE_LIMIT = 8.0

_MAX_NAMES = 8


class Rendezvous:
    """The chief's side of the rendezvous: call `wait` for the machines, then use `channels` to the workers' agents.

    Args:
        given: this process's cluster.
        limits: time limits.
        environment: environment of this process; the secret is removed from it.

    Raises:
        ResourceSpecError: there is no secret.
    """

    def __init__(self, given: GivenCluster, limits: Timeouts, environment: MutableMapping[str, str]) -> None:
        assert given.index == 0 and given.count is not None, "this process is the chief"
        self._given, self._limits, self._count = given, limits, given.count
        self._source = SecretSource.find(given, environment) if given.count > 1 else None
        self._channels: tuple[Channel, ...] = ()
        self._process: subprocess.Popen[bytes] | None = None
        self._events: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._arrivals: dict[int, Arrival] = {}
        self._machines: Machines | None = None
        self._port_problem: str | None = None
        self._owner = os.getpid()

    def wait(self, own: Hello, replicas: int | None = None) -> Machines:
        """Waits until all processes have joined.

        Args:
            own: the `Hello` of the chief.
            replicas: replicas of each worker; None for one per GPU, or one on its CPU.

        Raises:
            ClusterError: a process has not joined within `join_timeout`, has left, or cannot take part. The reason is
                sent to the processes that have joined.
        """
        try:
            self._machines = self._collect(own, replicas)
        except BaseException as error:
            self.close(f"the run did not start: {error}")
            raise
        finally:
            self._forget_secret()
        atexit.register(self.close, "the chief's script ended before it started anything")
        return self._machines

    @property
    def is_of_this_process(self) -> bool:
        """True if this process has created the object, False in a process forked from it."""
        return os.getpid() == self._owner

    @property
    def machines(self) -> Machines:
        """The result of `wait`."""
        assert self._machines is not None, "`wait` has returned"
        return self._machines

    @property
    def channels(self) -> tuple[Channel, ...]:
        """Channels to the agents of all workers except the chief, in the order of the workers."""
        return tuple(self._channels[process - 1] for process in self.machines.processes[1:])

    def close(self, reason: str) -> None:
        """Sends the reason to the processes that have joined, if the run was not started, and ends the server."""
        if not self.is_of_this_process or self._process is None or self._process.poll() is not None:
            return
        numbers = self._numbers_in_use()
        for number, channel in enumerate(self._channels):
            try:
                if number in numbers:
                    channel.stdin.write(encode(Lost(reason)))
                channel.stdin.close()
            except (OSError, ValueError):  # the process has ended; ValueError: the run was started, and is over
                continue
        try:
            self._process.wait(_CLOSE_LIMIT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def leave(self, reason: str) -> None:
        """The same as `close`, in a process that goes on."""
        atexit.unregister(self.close)
        self.close(reason)
        if self._process is not None and self._process.stdout is not None:
            self._reading.join(_CLOSE_LIMIT)
            self._process.stdout.close()

    def _collect(self, own: Hello, replicas: int | None) -> Machines:
        if self._source is not None:
            self._start_server(self._source.make().decode())
            self._wait_for_all()
        return machines_of(own, list(self._arrivals.values()), replicas, self._given.addresses)

    def _numbers_in_use(self) -> Collection[int]:
        """Returns the numbers of the channels to the processes that are there."""
        return {index - 1 for index in self._arrivals}

    def _forget_secret(self) -> None:
        if self._source is not None:
            self._source.forget()

    def _order(self, secret: str) -> RendezvousOrder:
        """Returns the order of the server."""
        given = self._given
        # If the environment has addresses of servers, TensorFlow's server later uses the same port.
        return RendezvousOrder(
            _host_to_listen_on(given.chief), given.port, self._count, secret, not given.addresses,
            self._limits.silence_timeout, self._limits.stop_timeout,
        )  # fmt: skip

    @property
    def _most_channels(self) -> int:
        """The number of processes that may join the server."""
        return self._count - 1

    def _start_server(self, secret: str) -> None:
        order = self._order(secret)
        self._process, self._channels = start_relay("rendezvous", order, self._most_channels, stdout=subprocess.PIPE)
        self._reading = start_thread("rendezvous-events", self._read_events, self._process)

    def _read_events(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None, "stdout is a pipe"
        for line in process.stdout:
            match decode(line):
                case Warned(text):
                    _log.warning("%s", text)
                case event:
                    self._on_event(event)
        self._on_event(None)

    def _on_event(self, event: Message | None) -> None:
        """Handles an event of the server, in the thread that reads them; None: the server has ended."""
        self._events.put(event)

    def _wait_for_all(self) -> None:
        limit, logged_at = self._limits.join_timeout, 0.0
        stopwatch = Stopwatch()
        while (missing := self._missing) and not self._is_enough(stopwatch.read()):
            waited = stopwatch.read()
            if waited >= limit:
                if self._port_problem is not None:
                    raise ClusterError(f"The run cannot start: for {limit:g} s {self._port_problem}.")
                raise ClusterError(self._missing_text(missing, limit))
            if waited - logged_at >= _LOG_INTERVAL:
                logged_at = waited
                _log.info("still waiting for %s", _names(missing))
            try:
                self._note(self._events.get(timeout=POLL_INTERVAL))
            except queue.Empty:
                continue

    @property
    def _missing(self) -> list[int]:
        return [index for index in range(1, self._count) if index not in self._arrivals]

    def _is_enough(self, waited: float) -> bool:
        """Returns True if the run starts without those that are missing after `waited` seconds."""
        return False

    def _note(self, event: Message | None) -> None:
        given = self._given
        match event:
            case PortInUse():
                self._port_problem = event.problem
                _log.warning("waiting for up to %g s: %s.", self._limits.join_timeout, event.problem)
            case Listening():
                self._port_problem = None
                _log.info(
                    "%s: this is process 0 of %d; the others have to reach it at %s, port %d",
                    given.form, self._count, given.chief, given.port,
                )  # fmt: skip
            case ProcessJoined():
                hello = event.arrival.hello
                self._arrivals[hello.index] = event.arrival
                devices = f"{len(hello.gpus)} GPUs" if hello.gpus else f"{len(hello.cores)} cores"
                _log.info("%s has joined, with %s (%d of %d)", event.arrival.name, devices, self._joined, self._count)
            case Failed():
                raise ClusterError(f"The run cannot start: {event.problem}.")
            case None:
                raise ClusterError("The run cannot start: the process that waits for the others ended.")

    @property
    def _joined(self) -> int:
        return len(self._arrivals) + 1

    def _missing_text(self, missing: Sequence[int], limit: float) -> str:
        given = self._given
        at = "".join(f" ({given.addresses[index]})" for index in missing[:1] if given.addresses)
        return (
            f"{_names(missing)}{at} of {self._count} did not join within {limit:g} s. Check that the scheduler has "
            f"started it, its output, and that it can reach {given.chief} at port {given.port}; raise `join_timeout` "
            "if it takes longer."
        )


def _names(indices: Sequence[int]) -> str:
    shown = ", ".join(map(str, indices[:_MAX_NAMES]))
    more = f" and {len(indices) - _MAX_NAMES} more" if len(indices) > _MAX_NAMES else ""
    return f"process{'es' if len(indices) > 1 else ''} {shown}{more}"


def _host_to_listen_on(chief: str) -> str:
    """Returns the chief's address if it is one of this machine's, else ""; a name may resolve differently elsewhere."""
    try:
        ipaddress.ip_address(chief)
    except ValueError:
        return "127.0.0.1" if chief == "localhost" else ""
    return chief if is_own_address(chief) else ""
