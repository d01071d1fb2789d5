"""The messages between coordinator, agent and member: one JSON object a line.

A message is a frozen value; `encode` makes its line and `decode` reads it back, by its `kind`. Times are in seconds.
"""

from __future__ import annotations

import contextlib
import enum
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Base64UrlBytes, Field, PlainSerializer, TypeAdapter, ValidationError


class ProtocolError(Exception):
    """A line that is no message."""


# Halves of surrogate pairs, as names of files that are no UTF-8 have them in Python, are no text for JSON.
_Text = Annotated[
    str,
    PlainSerializer(lambda text: text.encode("utf-8", "surrogatepass").decode("latin-1"), return_type=str),
    AfterValidator(lambda carried: carried.encode("latin-1").decode("utf-8", "surrogatepass")),
]


@dataclass(frozen=True)
class Message:
    """Base of all messages."""


@dataclass(frozen=True)
class Inspect(Message):
    """Coordinator to agent: look at your machine. Answered by `Facts`.

    Attributes:
        script: path of the script, None if it is not a file.
        directory: where the script is to run.
        port: that the worker's server is to use, None for any free one.
        packages: whose versions are to be told.
        hosts: of all workers, as they reach one another.
    """

    kind: Literal["Inspect"] = field(default="Inspect", kw_only=True)
    script: _Text | None
    directory: _Text
    port: int | None
    packages: tuple[_Text, ...] = ()
    hosts: tuple[_Text, ...] = ()


@dataclass(frozen=True)
class Facts(Message):
    """Agent to coordinator: what it found.

    Attributes:
        python: version of the interpreter that would run the script.
        tensorflow: its version there, None if it is not installed.
        port: held for the worker's server, None if there is none.
        problems: what would keep the script from running.
        autodist: its version there; None of one that does not tell.
        packages: versions of what was asked for and is installed.
        digest: of the script's content; None if there is none, or it cannot be read.
        unresolved: of the hosts, the names that cannot be resolved there, with the reasons.
    """

    kind: Literal["Facts"] = field(default="Facts", kw_only=True)
    python: _Text
    tensorflow: _Text | None
    port: int | None
    problems: tuple[_Text, ...] = ()
    autodist: _Text | None = None
    packages: Mapping[_Text, _Text] = field(default_factory=dict)
    digest: _Text | None = None
    unresolved: Mapping[_Text, _Text] = field(default_factory=dict)


@dataclass(frozen=True)
class Start(Message):
    """Coordinator to agent: start the script.

    Attributes:
        arguments: of the Python interpreter.
        directory: where it runs.
        environment: variables to add.
        join: what its member is told.
    """

    kind: Literal["Start"] = field(default="Start", kw_only=True)
    arguments: tuple[_Text, ...]
    directory: _Text
    environment: Mapping[_Text, _Text]
    join: Membership


@dataclass(frozen=True)
class Membership(Message):
    """Agent to member, first thing: who it is, and what it needs to take part.

    Attributes:
        index: of the worker.
        name: of the worker.
        addresses: of all workers' servers, as "host:port".
        payload: whatever the chief's caller wants to reach every worker.
        stop_timeout: between SIGTERM and SIGKILL, where the script has to end itself.
        silence_timeout: without a heartbeat of the agent, after which the script ends itself.
        brought: what the chief's script runs that is in no file; nothing of most.
        on_preempt: whether the chief saves when SIGTERM comes to the worker, which then does not end by the first one.
    """

    kind: Literal["Membership"] = field(default="Membership", kw_only=True)
    index: int
    name: _Text
    addresses: tuple[_Text, ...]
    payload: Base64UrlBytes
    stop_timeout: float
    silence_timeout: float
    brought: Base64UrlBytes = b""
    on_preempt: bool = False


@dataclass(frozen=True)
class Joined(Message):
    """Member to agent to coordinator: the script has made contact."""

    kind: Literal["Joined"] = field(default="Joined", kw_only=True)


@dataclass(frozen=True)
class Leaving(Message):
    """Member or agent to coordinator: SIGTERM has come, by which a machine says that it goes away."""

    kind: Literal["Leaving"] = field(default="Leaving", kw_only=True)


@dataclass(frozen=True)
class Done(Message):
    """Member to agent to coordinator: the script has ended well and waits for the others."""

    kind: Literal["Done"] = field(default="Done", kw_only=True)


class Doing(enum.StrEnum):
    """What a worker's script does."""

    JOINING = "joining"  # of the chief: it has come to its first step, and waits for the others to
    STEPPING = "stepping"  # a step, or something else that may wait for other workers
    ELSE = "else"  # whatever it does between steps
    DONE = "done"  # it has ended


@dataclass(frozen=True)
class Ask(Message):
    """Coordinator to agent to member: what does the script do? Answered by `Progress`, unless the process stands.

    Attributes:
        is_on_its_way: whether the script may not have come to its first step yet. Then the agent answers, since no
            member may be there, or what the script imports, reads or traces lets nothing else of it run for long.
    """

    kind: Literal["Ask"] = field(default="Ask", kw_only=True)
    is_on_its_way: bool = False


@dataclass(frozen=True)
class Progress(Message):
    """Member to agent to coordinator: what the script does.

    Attributes:
        doing: what it does.
        since: for how many seconds.
        processor: seconds of processor time that its process has used so far.
        queued: seconds that its threads have waited for a processor so far, where there are too few for all.
    """

    kind: Literal["Progress"] = field(default="Progress", kw_only=True)
    doing: Doing
    since: float
    processor: float
    queued: float = 0.0

    @classmethod
    def of_this_process(cls, doing: Doing, began: float) -> Progress:
        """What this process does since `began`, a time of `time.monotonic`."""
        return cls(doing, time.monotonic() - began, time.process_time(), _queued())


def _queued() -> float:
    """Seconds that this process's threads have waited for a processor, those of them that still run."""
    nanoseconds = 0
    for file in Path("/proc/self/task").glob("*/schedstat"):
        with contextlib.suppress(OSError, IndexError, ValueError):  # a thread that has ended, or a kernel without it
            nanoseconds += int(file.read_text().split()[1])
    return nanoseconds / 1e9


@dataclass(frozen=True)
class Said(Message):
    """Coordinator to agent to member: what the chief says before its servers have met; read in order.

    Attributes:
        text: what the chief says.
    """

    kind: Literal["Said"] = field(default="Said", kw_only=True)
    text: _Text


@dataclass(frozen=True)
class Waiting(Message):
    """Coordinator to agent to member: the chief's script has come to its first step, and waits there for the others."""

    kind: Literal["Waiting"] = field(default="Waiting", kw_only=True)


@dataclass(frozen=True)
class Release(Message):
    """Coordinator to agent to member: all are done, the process may end."""

    kind: Literal["Release"] = field(default="Release", kw_only=True)


@dataclass(frozen=True)
class Stop(Message):
    """Coordinator to agent: end the script now."""

    kind: Literal["Stop"] = field(default="Stop", kw_only=True)


@dataclass(frozen=True)
class Line(Message):
    """Agent to coordinator: a line that the script printed.

    Attributes:
        stream: "stdout" or "stderr".
        text: without its line end.
    """

    kind: Literal["Line"] = field(default="Line", kw_only=True)
    stream: str
    text: str


@dataclass(frozen=True)
class Exited(Message):
    """Agent to coordinator, last thing: the script's process has ended and nothing of it is left.

    Attributes:
        status: exit status; a negative one is the number of a signal.
    """

    kind: Literal["Exited"] = field(default="Exited", kw_only=True)
    status: int


@dataclass(frozen=True)
class Heartbeat(Message):
    """Both ways over SSH, and agent to member: still here."""

    kind: Literal["Heartbeat"] = field(default="Heartbeat", kw_only=True)


@dataclass(frozen=True)
class Lost(Message):
    """Relay or agent to coordinator, last thing: the machine or the script cannot be reached any more, or never could.

    Attributes:
        problem: what is wrong, the reason and the mend.
        is_away: whether that is all that is known: nothing is heard of the machine, and nothing was refused there.
    """

    kind: Literal["Lost"] = field(default="Lost", kw_only=True)
    problem: _Text
    is_away: bool = False


_MESSAGE: TypeAdapter[Message] = TypeAdapter(
    Annotated[
        Inspect | Facts | Start | Membership | Joined | Leaving | Done | Ask | Progress | Said | Waiting | Release
        | Stop | Line | Exited | Heartbeat | Lost,
        Field(discriminator="kind"),
    ]
)  # fmt: skip


def encode(message: Message) -> bytes:
    """The line that carries a message, its line end included."""
    return _MESSAGE.dump_json(message) + b"\n"


def decode(line: bytes) -> Message:
    """The message that a line carries.

    What another version adds to a message is left out, so that versions can be compared, which stops the run with the
    mend.

    Raises:
        ProtocolError: it carries none.
    """
    try:
        return _MESSAGE.validate_json(line)
    except ValidationError as error:
        raise ProtocolError(f"not a message: {line[:200]!r}") from error
