"""The messages between `autodist check` and the probe on each machine.

Their kinds and fields are those of earlier versions, so that a machine with another version is reported as such.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autodist.cluster.protocol import Facts, Message


@dataclass(frozen=True)
class MachineRequest(Message, kind="look"):
    """Request to inspect the machine and reserve its workers' ports. Answered by `MachineAnswer`.

    Attributes:
        ports: the port to reserve for each worker's server; None for any free port.
        script: path of the script, if it is known.
        directory: its working directory, if it is known.
        packages: the packages whose versions are requested.
        counts_gpus: True to count GPUs with TensorFlow, which takes seconds.
        sets_firewall: True if the run sets a firewall.
    """

    ports: tuple[int | None, ...]
    script: str | None = None
    directory: str | None = None
    packages: tuple[str, ...] = ()
    counts_gpus: bool = False
    sets_firewall: bool = False


@dataclass(frozen=True)
class GPU:
    """One GPU of a machine, as reported by its driver.

    Attributes:
        name: name of the model.
        memory: size of its memory in bytes.
    """

    name: str
    memory: int


@dataclass(frozen=True)
class Interface:
    """One address of a network interface.

    Attributes:
        name: name of the interface.
        address: its address with the prefix length of its network, as in 10.0.0.1/24.
    """

    name: str
    address: str


@dataclass(frozen=True)
class Hardware:
    """The hardware of a machine. Sizes are in bytes; 0 if not known.

    Attributes:
        cores: number of cores that a process may use.
        memory: size of the memory of the machine, or of the container.
        memory_free: memory available to processes.
        disk: size of the file system that contains the script, or else the home directory.
        disk_free: free space of that file system.
        gpus: the GPUs that their driver reports.
        interfaces: the addresses of all network interfaces, without loopback.
    """

    cores: int
    memory: int = 0
    memory_free: int = 0
    disk: int = 0
    disk_free: int = 0
    gpus: tuple[GPU, ...] = ()
    interfaces: tuple[Interface, ...] = ()


@dataclass(frozen=True)
class SeenGPUs(Message):
    """The GPUs that TensorFlow sees.

    Attributes:
        count: number of GPUs.
        reason: the reason for missing GPUs, if known.
    """

    count: int
    reason: str = ""


@dataclass(frozen=True)
class MachineAnswer(Message, kind="machine"):
    """The state of a machine.

    Attributes:
        facts: properties of the machine that a run compares before it starts.
        ports: the reserved port of each worker; None if the reservation failed, with the reason in `facts.problems`.
        hardware: the hardware of the machine.
        seen_gpus: the GPUs that TensorFlow sees; None if they were not requested.
    """

    facts: Facts
    ports: tuple[int | None, ...]
    hardware: Hardware
    seen_gpus: SeenGPUs | None = None


@dataclass(frozen=True)
class TimeRequest(Message, kind="tick"):
    """Request for the time. Answered by `TimeAnswer`."""


@dataclass(frozen=True)
class TimeAnswer(Message, kind="tock"):
    """The time.

    Attributes:
        at: seconds since 1970, by the machine's clock.
    """

    at: float


@dataclass(frozen=True)
class ConnectRequest(Message, kind="reach"):
    """Request to connect to ports of other machines. Answered by `ConnectAnswer`.

    Attributes:
        addresses: the ports, each as "host:port".
        limit: timeout in seconds for each address.
    """

    addresses: tuple[str, ...]
    limit: float


@dataclass(frozen=True)
class ConnectAnswer(Message, kind="reached"):
    """The addresses that could not be connected to.

    Attributes:
        problems: maps each address to the reason.
    """

    problems: Mapping[str, str]
