"""Base class and helpers of the launcher environments, in which a scheduler starts the processes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from autodist.cluster.addresses import is_loopback, split_host_and_port
from autodist.errors import ResourceSpecError
from autodist.resources import is_own_address

Environment = Mapping[str, str]

CHIEF, INDEX, WORKERS = "AUTODIST_CHIEF", "AUTODIST_INDEX", "AUTODIST_WORKERS"
SECRET, SECRET_FILE, ADDRESS = "AUTODIST_SECRET", "AUTODIST_SECRET_FILE", "AUTODIST_ADDRESS"

RENDEZVOUS_DONE = "AUTODIST_MET"
"""Set by a chief, for the processes that it starts, when the rendezvous is complete."""

OF_ONE_PROCESS = frozenset({CHIEF, INDEX, WORKERS, SECRET, SECRET_FILE, ADDRESS, RENDEZVOUS_DONE})
"""Variables that describe a single process and are not passed on to others."""

DEFAULT_PORT = 15000
"""Default port of the rendezvous server."""

MAX_PORT = 65535
MAX_WORKERS = 100_000


@dataclass(frozen=True)
class GivenCluster:
    """The cluster of a process, read from its environment.

    Attributes:
        form: name of the launcher environment, for messages.
        index: index of this process; the chief's is 0.
        count: number of processes; may be None except in the chief.
        chief: name or address of the chief's machine.
        port: port of the rendezvous server there.
        addresses: "host:port" of each process's server by its index, if the environment has them.
        job: text that distinguishes this run from others of the same user; None if there is none.
        cores: number of cores allotted to this process; None if unknown.
    """

    form: str
    index: int
    count: int | None
    chief: str
    port: int = DEFAULT_PORT
    addresses: tuple[str, ...] = ()
    job: str | None = None
    cores: int | None = None

    @property
    def is_on_one_machine(self) -> bool:
        """True if all processes run on this machine."""
        hosts = {split_host_and_port(address)[0] for address in self.addresses}
        return is_loopback(self.chief) or (len(hosts) == 1 and is_own_address(self.chief))


class LauncherEnv(ABC):
    """A launcher environment: the variables that one kind of scheduler sets."""

    name: ClassVar[str]

    @abstractmethod
    def is_present(self, environment: Environment) -> bool:
        """Returns True if this launcher has started a process with this environment."""

    @abstractmethod
    def read(self, environment: Environment) -> GivenCluster:
        """Reads the cluster from the environment.

        Raises:
            ResourceSpecError: names the variable that is missing or malformed.
        """


def text_of(environment: Environment, name: str, what: str) -> str:
    """Returns the text of a variable; `what` describes it in the error.

    Raises:
        ResourceSpecError: the variable is missing or empty.
    """
    if not environment.get(name):
        raise ResourceSpecError(f"the environment variable {name} is missing; set it to {what}.")
    return environment[name]


def number_of(environment: Environment, name: str, what: str, lowest: int, highest: int) -> int:
    """Returns the number in a variable; `what` describes it in the error.

    Raises:
        ResourceSpecError: the variable is missing, or not a number from `lowest` to `highest`.
    """
    text = text_of(environment, name, what)
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and lowest <= int(text) <= highest):
        raise ResourceSpecError(
            f"the environment variable {name} is {text[:60]!r}; allowed: a whole number from {lowest} to "
            f"{highest}, {what}."
        )
    return int(text)


def index_and_count(environment: Environment, index: str, count: str) -> tuple[int, int]:
    """Returns the index of this process and the number of processes, from two variables.

    Raises:
        ResourceSpecError: a variable is missing or malformed, or they contradict each other.
    """
    number = number_of(environment, count, "the number of processes", 1, MAX_WORKERS)
    rank = number_of(environment, index, "the number of this process, counted from 0", 0, MAX_WORKERS)
    if rank >= number:
        raise ResourceSpecError(f"{index} is {rank}, and {count} is {number}; allowed: 0 to {number - 1}.")
    return rank, number


def chief_in(environment: Environment, port: int = DEFAULT_PORT) -> tuple[str, int] | None:
    """Returns the host and port in AUTODIST_CHIEF; None if it is not set.

    Raises:
        ResourceSpecError: it is malformed.
    """
    address = environment.get(CHIEF)
    return None if address is None else host_and_port_of(address, CHIEF, port)


def host_and_port_of(text: str, name: str, port: int | None) -> tuple[str, int]:
    """Parses "host:port", "[::1]:port" or, with a default port, "host".

    Raises:
        ResourceSpecError: the text has another form; names the variable.
    """
    host, colon, number = text.rpartition(":")
    is_ipv6_alone = ":" in host and not host.startswith("[")
    if not colon or text.endswith("]") or is_ipv6_alone:
        host, number = text, "" if port is None else str(port)
    host = host.removeprefix("[").removesuffix("]")
    if (
        not host
        or any(sign in host for sign in " /@\t\n")
        or not (number.isascii() and number.isdecimal() and len(number) < 6 and 1 <= int(number) <= MAX_PORT)
    ):
        what = "HOST:PORT" if port is None else "HOST or HOST:PORT"
        raise ResourceSpecError(f"{name} is {text[:60]!r}; allowed: {what}, with a port from 1 to {MAX_PORT}.")
    return host, int(number)
