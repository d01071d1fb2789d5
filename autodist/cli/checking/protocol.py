"""Protocol between `autodist check` and the probe on each machine: one JSON object per line."""

from __future__ import annotations

from typing import Annotated, Literal

import pydantic

from autodist.cluster.protocol import Facts


class _Part(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True)


class MachineQuestion(_Part):
    """Request to inspect the machine and reserve its workers' ports. Answered by `MachineAnswer`.

    Attributes:
        script: path of the script, if it is known.
        directory: its working directory, if it is known.
        ports: the port to reserve for each worker's server; None for any free port.
        packages: the packages whose versions are requested.
        counts_gpus: True to count GPUs with TensorFlow, which takes seconds.
    """

    kind: Literal["look"] = "look"
    script: str | None = None
    directory: str | None = None
    ports: tuple[int | None, ...]
    packages: tuple[str, ...] = ()
    counts_gpus: bool = False


class GPU(_Part):
    """One GPU of a machine, as reported by its driver.

    Attributes:
        name: name of the model.
        memory: size of its memory in bytes.
    """

    name: str
    memory: int


class Interface(_Part):
    """One address of a network interface.

    Attributes:
        name: name of the interface.
        address: its address with the prefix length of its network, as in 10.0.0.1/24.
    """

    name: str
    address: str


class Hardware(_Part):
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


class SeenGPUs(_Part):
    """The GPUs that TensorFlow sees.

    Attributes:
        count: number of GPUs.
        reason: the reason for missing GPUs, if known.
    """

    count: int
    reason: str = ""


class MachineAnswer(_Part):
    """The state of a machine.

    Attributes:
        facts: properties of the machine that a run compares before it starts.
        ports: the reserved port of each worker; None if the reservation failed, with the reason in `facts.problems`.
        hardware: the hardware of the machine.
        seen_gpus: the GPUs that TensorFlow sees; None if they were not requested.
    """

    kind: Literal["machine"] = "machine"
    facts: Facts
    ports: tuple[int | None, ...]
    hardware: Hardware
    seen_gpus: SeenGPUs | None = None


class Tick(_Part):
    """Request for the time. Answered by `Tock`."""

    kind: Literal["tick"] = "tick"


class Tock(_Part):
    """The time.

    Attributes:
        at: seconds since 1970, by the machine's clock.
    """

    kind: Literal["tock"] = "tock"
    at: float


class Reach(_Part):
    """Request to connect to ports of other machines. Answered by `Reached`.

    Attributes:
        addresses: the ports, each as "host:port".
        limit: timeout in seconds for each address.
    """

    kind: Literal["reach"] = "reach"
    addresses: tuple[str, ...]
    limit: float


class Reached(_Part):
    """The addresses that could not be connected to.

    Attributes:
        problems: maps each address to the reason.
    """

    kind: Literal["reached"] = "reached"
    problems: dict[str, str]


Question = Annotated[MachineQuestion | Tick | Reach, pydantic.Field(discriminator="kind")]
Answer = Annotated[MachineAnswer | Tock | Reached, pydantic.Field(discriminator="kind")]

_QUESTION: pydantic.TypeAdapter[Question] = pydantic.TypeAdapter(Question)
_ANSWER: pydantic.TypeAdapter[Answer] = pydantic.TypeAdapter(Answer)


def line_of(message: Question | Answer) -> bytes:
    """Serializes a message as one line that ends with a newline."""
    return message.model_dump_json().encode() + b"\n"


def question_in(line: bytes) -> Question | None:
    """Returns the request in a line; None for other lines, such as the heartbeats of an SSH connection."""
    try:
        return _QUESTION.validate_json(line)
    except pydantic.ValidationError:
        return None


def answer_in(line: bytes) -> Answer | None:
    """Returns the answer in a line; None for other lines, such as the greeting of a login."""
    try:
        return _ANSWER.validate_json(line)
    except pydantic.ValidationError:
        return None
