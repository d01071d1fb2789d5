"""What `autodist check` asks the probe on each machine, and what that answers: one JSON object a line."""

from __future__ import annotations

from typing import Annotated, Literal

import pydantic

from autodist.cluster.protocol import Facts


class _Part(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True)


class MachineQuestion(_Part):
    """Look at your machine, and keep its workers' ports. Answered by `MachineAnswer`.

    Attributes:
        script: path of the script, if it is known which will run.
        directory: where it is to run, if that is known.
        ports: of the workers' servers; None: any free one.
        packages: whose versions are to be told.
        counts_gpus: whether TensorFlow is to be asked for GPUs, which takes seconds.
    """

    kind: Literal["look"] = "look"
    script: str | None = None
    directory: str | None = None
    ports: tuple[int | None, ...]
    packages: tuple[str, ...] = ()
    counts_gpus: bool = False


class GPU(_Part):
    """One of a machine's GPUs, as its driver tells of it.

    Attributes:
        name: of its kind.
        memory: in bytes.
    """

    name: str
    memory: int


class Interface(_Part):
    """One address of a network interface.

    Attributes:
        name: of the interface.
        address: with the length of its network's prefix, as in 10.0.0.1/24.
    """

    name: str
    address: str


class Hardware(_Part):
    """What a machine has. Sizes are in bytes; those that are not known are 0.

    Attributes:
        cores: that a process may use.
        memory: of the machine, or of the container.
        memory_free: that processes can still get.
        disk: of the file system where the script runs, or else the home directory stands.
        disk_free: of it.
        gpus: as their driver tells.
        interfaces: with their addresses, the loopback one left out.
    """

    cores: int
    memory: int = 0
    memory_free: int = 0
    disk: int = 0
    disk_free: int = 0
    gpus: tuple[GPU, ...] = ()
    interfaces: tuple[Interface, ...] = ()


class SeenGPUs(_Part):
    """What TensorFlow sees.

    Attributes:
        count: of GPUs.
        reason: why it is not more, if that is known.
    """

    count: int
    reason: str = ""


class MachineAnswer(_Part):
    """What a machine has to say.

    Attributes:
        facts: that a run compares before it starts.
        ports: kept, by worker; None where that is not possible, which is among the facts' problems.
        hardware: of the machine.
        seen_gpus: None: nobody has asked.
    """

    kind: Literal["machine"] = "machine"
    facts: Facts
    ports: tuple[int | None, ...]
    hardware: Hardware
    seen_gpus: SeenGPUs | None = None


class Tick(_Part):
    """What time is it? Answered by `Tock`."""

    kind: Literal["tick"] = "tick"


class Tock(_Part):
    """The time.

    Attributes:
        at: in seconds since 1970, by the machine's clock.
    """

    kind: Literal["tock"] = "tock"
    at: float


class Reach(_Part):
    """Connect to other machines' ports. Answered by `Reached`.

    Attributes:
        addresses: as "host:port".
        limit: in seconds, for each.
    """

    kind: Literal["reach"] = "reach"
    addresses: tuple[str, ...]
    limit: float


class Reached(_Part):
    """Which addresses could not be connected to.

    Attributes:
        problems: by address, why it cannot be connected to; those that can are left out.
    """

    kind: Literal["reached"] = "reached"
    problems: dict[str, str]


Question = Annotated[MachineQuestion | Tick | Reach, pydantic.Field(discriminator="kind")]
Answer = Annotated[MachineAnswer | Tock | Reached, pydantic.Field(discriminator="kind")]

_QUESTION: pydantic.TypeAdapter[Question] = pydantic.TypeAdapter(Question)
_ANSWER: pydantic.TypeAdapter[Answer] = pydantic.TypeAdapter(Answer)


def line_of(said: Question | Answer) -> bytes:
    """The line that carries it, its end included."""
    return said.model_dump_json().encode() + b"\n"


def question_in(line: bytes) -> Question | None:
    """What is asked; None for a line that asks nothing, as the heartbeats of an SSH connection do."""
    try:
        return _QUESTION.validate_json(line)
    except pydantic.ValidationError:
        return None


def answer_in(line: bytes) -> Answer | None:
    """What is answered; None for a line that answers nothing, as the greeting of a login."""
    try:
        return _ANSWER.validate_json(line)
    except pydantic.ValidationError:
        return None
