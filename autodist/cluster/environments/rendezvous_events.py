"""The order of a rendezvous server, and the events that it reports to the chief."""

from __future__ import annotations

from dataclasses import dataclass

from autodist.cluster.environments.roster import Arrival
from autodist.cluster.protocol import Message
from autodist.cluster.stream_relay import RelayOrder


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
    """

    host: str
    port: int
    count: int
    secret: str
    stays_open: bool
    silence_timeout: float
    stop_timeout: float


@dataclass(frozen=True)
class Listening(Message):
    """The server listens."""


@dataclass(frozen=True)
class PortInUse(Message):
    """The port is in use; the server waits for it as long as the chief waits."""

    problem: str


@dataclass(frozen=True)
class ProcessJoined(Message):
    """A process has joined the run."""

    arrival: Arrival


@dataclass(frozen=True)
class Warned(Message):
    """A warning for the user."""

    text: str


@dataclass(frozen=True)
class Failed(Message):
    """The rendezvous has failed."""

    problem: str
