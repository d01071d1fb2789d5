"""The roster of a run: the processes that have joined, the rules that refuse others, and the messages about both."""

from __future__ import annotations

from dataclasses import dataclass, field

from autodist.cluster.environments.handshake import Hello, RefusedError
from autodist.cluster.protocol import Message
from autodist.cluster.stream_relay import RelayOrder
from autodist.versions import VERSION

MAX_TRIES = 10
"""Number of wrong secrets after which no more connections are accepted."""


@dataclass(frozen=True)
class Arrival:
    """A process that has connected.

    Attributes:
        hello: its first message.
        from_host: address that its connection comes from.
        to_host: address of the chief that it has connected to.
    """

    hello: Hello
    from_host: str
    to_host: str

    @property
    def name(self) -> str:
        """The process, its machine and its address, for messages."""
        host = self.hello.host
        return f"process {self.hello.index} on {host}" + (f" ({self.from_host})" if host != self.from_host else "")


@dataclass
class Roster:
    """The processes of a run. Not thread-safe.

    Args:
        count: number of processes, including the chief, which is process 0.
        left_out: indices of processes that the run cannot use.
    """

    count: int
    left_out: tuple[int, ...] = ()
    _arrivals: dict[int, Arrival] = field(default_factory=dict)
    _tries: int = 0

    @property
    def missing(self) -> tuple[int, ...]:
        """Indices of the processes that have not joined."""
        return tuple(index for index in range(1, self.count) if index not in self._arrivals)

    @property
    def is_closed(self) -> bool:
        """True after `MAX_TRIES` wrong secrets, when no more connections are accepted."""
        return self._tries >= MAX_TRIES

    def refuse_secret(self) -> RefusedError:
        """Counts a process with another secret; returns the error to send to it."""
        self._tries += 1
        return RefusedError("its secret differs from the chief's; give all processes of the run the same", True)

    def enter(self, arrival: Arrival) -> None:
        """Adds a process that has proved that it has the secret.

        Raises:
            RefusedError: the process cannot take part.
        """
        hello = arrival.hello
        if hello.version != VERSION:
            raise RefusedError(f"its AutoDist is {hello.version}, the chief's {VERSION}; install the same on both")
        if hello.count not in (None, self.count):
            raise RefusedError(
                f"it counts {hello.count} processes, the chief {self.count}; set the same number for both, or check "
                "that it does not belong to another run"
            )
        if not 1 <= hello.index < self.count:
            raise RefusedError(
                f"its index is {hello.index}; allowed: 1 to {self.count - 1}, each once, since the chief has 0 and "
                f"counts {self.count} processes"
            )
        if hello.index in self.left_out:
            raise RefusedError("the run goes on without it, since a start with it failed; see the chief's output")
        before = self._arrivals.get(hello.index)
        if before is not None:
            raise RefusedError(
                f"its index, {hello.index}, is that of a process that joined before, on {before.hello.host} "
                f"({before.from_host}); give each process its own"
            )
        self._arrivals[hello.index] = arrival

    def leave(self, arrival: Arrival) -> None:
        """Removes a process that has left, so that another one with its index may come."""
        del self._arrivals[arrival.hello.index]


@dataclass(frozen=True)
class RendezvousOrder(RelayOrder):
    """The settings of a rendezvous server.

    Attributes:
        host: address to listen on; "" for all addresses of the machine.
        port: port to listen on.
        count: number of processes, including the chief.
        secret: the run's secret.
        stays_open: True if the server listens until the run ends, to refuse late processes with a reason.
        silence_timeout: seconds without a message after which a machine counts as lost.
        stop_timeout: seconds between SIGTERM and SIGKILL for a script.
        is_elastic: True if processes may come and leave until the chief ends the server. Each then gets the next
            channel, and not that of its index.
        left_out: indices of processes that the run cannot use.
        secret_file: path of the chief's file with the secret, which the server removes at its end, however the chief
            ends; "" if there is none to remove.
    """

    host: str
    port: int
    count: int
    secret: str
    stays_open: bool
    silence_timeout: float
    stop_timeout: float
    is_elastic: bool = False
    left_out: tuple[int, ...] = ()
    secret_file: str = ""


@dataclass(frozen=True)
class Listening(Message):
    """The server listens."""


@dataclass(frozen=True)
class PortInUse(Message):
    """The port is in use; the server waits for it as long as the chief waits."""

    problem: str


@dataclass(frozen=True)
class ProcessJoined(Message):
    """A process has joined the run.

    Attributes:
        arrival: the process.
        channel: number of its channel.
    """

    arrival: Arrival
    channel: int


@dataclass(frozen=True)
class ProcessLeft(Message):
    """A process has left an elastic run.

    Attributes:
        channel: number of its channel.
    """

    channel: int


@dataclass(frozen=True)
class Warned(Message):
    """A warning for the user."""

    text: str


@dataclass(frozen=True)
class Failed(Message):
    """The rendezvous has failed."""

    problem: str
