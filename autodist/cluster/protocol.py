"""The messages between coordinator, agent and member: one JSON object a line.

A message is a frozen value; `encode` makes its line and `decode` reads it back. Times are in seconds.
"""

from __future__ import annotations

import base64
import contextlib
import enum
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any


class ProtocolError(Exception):
    """A line that is no message."""


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
    """

    script: str | None
    directory: str
    port: int | None
    packages: tuple[str, ...] = ()


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
    """

    python: str
    tensorflow: str | None
    port: int | None
    problems: tuple[str, ...] = ()
    autodist: str | None = None
    packages: Mapping[str, str] = field(default_factory=dict)
    digest: str | None = None


@dataclass(frozen=True)
class Start(Message):
    """Coordinator to agent: start the script.

    Attributes:
        arguments: of the Python interpreter.
        directory: where it runs.
        environment: variables to add.
        join: what its member is told.
    """

    arguments: tuple[str, ...]
    directory: str
    environment: Mapping[str, str]
    join: Join


@dataclass(frozen=True)
class Join(Message):
    """Agent to member, first thing: who it is, and what it needs to take part.

    Attributes:
        index: of the worker.
        name: of the worker.
        addresses: of all workers' servers, as "host:port".
        payload: whatever the chief's caller wants to reach every worker.
        stop_timeout: between SIGTERM and SIGKILL, where the script has to end itself.
    """

    index: int
    name: str
    addresses: tuple[str, ...]
    payload: bytes
    stop_timeout: float


@dataclass(frozen=True)
class Joined(Message):
    """Member to agent to coordinator: the script has made contact."""


@dataclass(frozen=True)
class Done(Message):
    """Member to agent to coordinator: the script has ended well and waits for the others."""


class Doing(enum.StrEnum):
    """What a worker's script does."""

    STEPPING = "stepping"  # a step, or something else that may wait for other workers
    ELSE = "else"  # whatever it does between steps
    DONE = "done"  # it has ended


@dataclass(frozen=True)
class Ask(Message):
    """Coordinator to agent to member: what does the script do? Answered by `Progress`, unless the process stands."""


@dataclass(frozen=True)
class Progress(Message):
    """Member to agent to coordinator: what the script does.

    Attributes:
        doing: that.
        since: for how many seconds.
        processor: seconds of processor time that its process has used so far.
        queued: seconds that its threads have waited for a processor so far, where there are too few for all.
    """

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
class Release(Message):
    """Coordinator to agent to member: all are done, the process may end."""


@dataclass(frozen=True)
class Stop(Message):
    """Coordinator to agent: end the script now."""


@dataclass(frozen=True)
class Line(Message):
    """Agent to coordinator: a line that the script printed.

    Attributes:
        stream: "stdout" or "stderr".
        text: without its line end.
    """

    stream: str
    text: str


@dataclass(frozen=True)
class Exited(Message):
    """Agent to coordinator, last thing: the script's process has ended and nothing of it is left.

    Attributes:
        status: exit status; a negative one is the number of a signal.
    """

    status: int


@dataclass(frozen=True)
class Heartbeat(Message):
    """Both ways over SSH: still here."""


@dataclass(frozen=True)
class Lost(Message):
    """Relay or agent to coordinator, last thing: the machine or the script cannot be reached any more, or never could.

    Attributes:
        problem: what is wrong, the reason and the mend.
    """

    problem: str


_KINDS: dict[str, type[Message]] = {
    kind.__name__: kind
    for kind in (
        *(Inspect, Facts, Start, Join, Joined, Done, Ask, Progress),
        *(Release, Stop, Line, Exited, Heartbeat, Lost),
    )
}


def encode(message: Message) -> bytes:
    """The line that carries a message, its line end included."""
    return json.dumps(_to_json(message), separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> Message:
    """The message that a line carries.

    Raises:
        ProtocolError: it carries none.
    """
    try:
        content = json.loads(line)
        return _from_json(content)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ProtocolError(f"not a message: {line[:200]!r}") from error


def _to_json(message: Message) -> dict[str, Any]:
    content: dict[str, Any] = {"is": type(message).__name__}
    for entry in fields(message):
        value = getattr(message, entry.name)
        if isinstance(value, Message):
            value = _to_json(value)
        elif isinstance(value, bytes):
            value = {"base64": base64.b64encode(value).decode()}
        content[entry.name] = value
    return content


def _from_json(content: dict[str, Any]) -> Message:
    values = dict(content)
    kind = _KINDS[values.pop("is")]
    # What another version adds is left out, so that versions can be compared, which stops the run with the mend.
    known = {entry.name for entry in fields(kind)}
    return kind(**{name: _value(value) for name, value in values.items() if name in known})


def _value(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(value)
    if isinstance(value, dict) and "is" in value:
        return _from_json(value)
    if isinstance(value, dict) and value.keys() == {"base64"}:
        return base64.b64decode(value["base64"])
    return value
