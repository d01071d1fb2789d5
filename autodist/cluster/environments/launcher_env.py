"""What all forms of environment have in common in which a scheduler starts processes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from autodist.cluster.addresses import is_loopback
from autodist.errors import ResourceSpecError

Environment = Mapping[str, str]

CHIEF, INDEX, WORKERS = "AUTODIST_CHIEF", "AUTODIST_INDEX", "AUTODIST_WORKERS"
SECRET, SECRET_FILE, ADDRESS = "AUTODIST_SECRET", "AUTODIST_SECRET_FILE", "AUTODIST_ADDRESS"

MET = "AUTODIST_MET"
"""Set by a chief, for what its process starts, once the processes of the cluster have met."""

OF_ONE_PROCESS = frozenset({CHIEF, INDEX, WORKERS, SECRET, SECRET_FILE, ADDRESS, MET})
"""Variables that tell a process its own part, and that no other one is given."""

DEFAULT_PORT = 15000
"""Where the processes meet, unless the environment says otherwise."""

HIGHEST_PORT = 65535
MOST_WORKERS = 100_000


@dataclass(frozen=True)
class Given:
    """What a process knows of its cluster from its environment.

    Attributes:
        form: the environment, for messages.
        index: of this process; the chief's is 0.
        count: how many there are; None: the chief knows.
        chief: name or address of the chief's machine.
        port: where they meet there.
        addresses: "host:port" of each one's server by its index, where the environment names them.
        job: what tells this run from others of the same user; None: nothing does.
        cores: that this process was given; None: not told.
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
        """Whether all processes are known to run on this machine."""
        return is_loopback(self.chief)


class LauncherEnv(ABC):
    """A form of environment."""

    name: ClassVar[str]

    @abstractmethod
    def is_there(self, environment: Environment) -> bool:
        """Whether a process with this environment was started so."""

    @abstractmethod
    def read(self, environment: Environment) -> Given:
        """What it says.

        Raises:
            ResourceSpecError: a variable is missing or malformed; names it.
        """


def text_of(environment: Environment, name: str, what: str) -> str:
    """A variable's text.

    Raises:
        ResourceSpecError: it is missing or empty.
    """
    if not environment.get(name):
        raise ResourceSpecError(f"the environment variable {name} is missing; set it to {what}.")
    return environment[name]


def number_of(environment: Environment, name: str, what: str, lowest: int, highest: int) -> int:
    """A variable's number.

    Raises:
        ResourceSpecError: it is missing, or no such number.
    """
    text = text_of(environment, name, what)
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and lowest <= int(text) <= highest):
        raise ResourceSpecError(
            f"the environment variable {name} is {text[:60]!r}; allowed: a whole number from {lowest} to "
            f"{highest}, {what}."
        )
    return int(text)


def index_and_count(environment: Environment, index: str, count: str) -> tuple[int, int]:
    """Which process this is, and how many there are, from two variables.

    Raises:
        ResourceSpecError: one is missing or malformed, or they contradict one another.
    """
    number = number_of(environment, count, "the number of processes", 1, MOST_WORKERS)
    own = number_of(environment, index, "the number of this process, counted from 0", 0, MOST_WORKERS)
    if own >= number:
        raise ResourceSpecError(f"{index} is {own}, and {count} is {number}; allowed: 0 to {number - 1}.")
    return own, number


def told_chief(environment: Environment, port: int = DEFAULT_PORT) -> tuple[str, int] | None:
    """Host and port that AUTODIST_CHIEF names; None if it is not there.

    Raises:
        ResourceSpecError: it is malformed.
    """
    told = environment.get(CHIEF)
    return None if told is None else host_and_port_of(told, CHIEF, port)


def host_and_port_of(text: str, name: str, port: int | None) -> tuple[str, int]:
    """Host and port of "host:port", "[::1]:port" or, with a default port, "host".

    Raises:
        ResourceSpecError: the text is none of these; names the variable that has it.
    """
    host, colon, number = text.rpartition(":")
    if (
        not colon or text.endswith("]") or (":" in host and not host.startswith("["))
    ):  # an IPv6 address alone has colons
        host, number = text, "" if port is None else str(port)
    host = host.removeprefix("[").removesuffix("]")
    if (
        not host
        or any(sign in host for sign in " /@\t\n")
        or not (number.isascii() and number.isdecimal() and len(number) < 6 and 1 <= int(number) <= HIGHEST_PORT)
    ):
        what = "HOST:PORT" if port is None else "HOST or HOST:PORT"
        raise ResourceSpecError(f"{name} is {text[:60]!r}; allowed: {what}, with a port from 1 to {HIGHEST_PORT}.")
    return host, int(number)
