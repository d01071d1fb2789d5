"""The protocol between the processes of a cluster, one JSON object per line, and the messages of a run.

A message is a frozen dataclass derived from `Message`. `encode` serializes a message to a line; `decode` parses it, by
its `kind`. Coordinator, agent and worker client exchange the messages of this module. The messages of the rendezvous
and of `autodist check` stand beside the code that exchanges them. All times are in seconds.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, BinaryIO, ClassVar

from pydantic import AfterValidator, Base64UrlBytes, PlainSerializer, TypeAdapter
from pydantic_core import from_json, to_json


class ProtocolError(Exception):
    """Raised for a line that is not a message."""


# JSON cannot represent lone surrogates, which Python uses in names of files that are not valid UTF-8.
_Text = Annotated[
    str,
    PlainSerializer(lambda text: text.encode("utf-8", "surrogatepass").decode("latin-1"), return_type=str),
    AfterValidator(lambda carried: carried.encode("latin-1").decode("utf-8", "surrogatepass")),
]


class Message:
    """Base of all messages. A subclass is a frozen dataclass.

    Attributes:
        kind: name of the class in JSON; by default the class's own name.
    """

    kind: ClassVar[str]
    _classes: ClassVar[dict[str, type[Message]]] = {}

    def __init_subclass__(cls, kind: str | None = None) -> None:
        cls.kind = kind or cls.__name__
        assert cls.kind not in Message._classes, f"there are two messages of the kind {cls.kind}"
        Message._classes[cls.kind] = cls


def encode(message: Message) -> bytes:
    """Serializes a message to a line, including the line ending."""
    return to_json({"kind": message.kind, **_adapter(message.kind).dump_python(message, mode="json")}) + b"\n"


def decode(line: bytes) -> Message:
    """Parses a line. Messages of modules that this process has not imported are unknown.

    Ignores unknown fields of other versions, so that `preflight` can compare the versions and report the difference.

    Raises:
        ProtocolError: the line is not a message.
    """
    try:
        content = from_json(line)
        message: Message = _adapter(content["kind"]).validate_python(content)
    except (ValueError, KeyError, TypeError) as error:
        raise ProtocolError(f"not a message: {line[:200]!r}") from error
    return message


def take_output() -> BinaryIO:
    """Returns standard output for messages, and redirects further output to standard error.

    Output of other code must not look like a message.
    """
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return output


@functools.cache
def _adapter(kind: str) -> TypeAdapter[Any]:
    return TypeAdapter(Message._classes[kind])


@dataclass(frozen=True)
class Inspect(Message):
    """Coordinator to agent: request for the facts of its machine. Answered by `Facts`.

    Attributes:
        script: path of the script, None if it is not a file.
        directory: working directory of the script.
        port: port for the worker's server, None for any free one.
        packages: names of packages to report the versions of.
        hosts: addresses of all workers.
        sets_firewall: True if the run sets a firewall for the worker's port.
    """

    script: _Text | None
    directory: _Text
    port: int | None
    packages: tuple[_Text, ...] = ()
    hosts: tuple[_Text, ...] = ()
    sets_firewall: bool = False


@dataclass(frozen=True)
class Facts(Message):
    """Agent to coordinator: the facts of its machine.

    Attributes:
        python: version of the interpreter that would run the script.
        tensorflow: version of TensorFlow, None if it is not installed.
        port: port reserved for the worker's server, None if there is none.
        problems: faults that keep the script from running.
        autodist: version of AutoDist; None if it is a version that does not report it.
        packages: versions of the requested packages that are installed.
        digest: digest of the script's content; None if there is no script, or it cannot be read.
        unresolved: the hosts whose names cannot be resolved there, with the reasons.
        interfaces: IP addresses of the machine, without loopback.
        no_firewall: the reason that no firewall can be set there; None if it can, or if none was requested.
    """

    python: _Text
    tensorflow: _Text | None
    port: int | None
    problems: tuple[_Text, ...] = ()
    autodist: _Text | None = None
    packages: Mapping[_Text, _Text] = field(default_factory=dict)
    digest: _Text | None = None
    unresolved: Mapping[_Text, _Text] = field(default_factory=dict)
    interfaces: tuple[_Text, ...] = ()
    no_firewall: _Text | None = None


@dataclass(frozen=True)
class Start(Message):
    """Coordinator to agent: start the script.

    Attributes:
        arguments: arguments of the Python interpreter.
        directory: working directory.
        environment: environment variables to add.
        membership: first message for the worker client.
        admitted: IP addresses that may connect to the worker's server, in addition to the machine itself; None: no
            firewall is set.
        forwarded: ports of the machine that lead to the servers of other machines.
        waits: True if the script starts early: its worker client waits for the membership of a later message.
    """

    arguments: tuple[_Text, ...]
    directory: _Text
    environment: Mapping[_Text, _Text]
    membership: Membership
    admitted: tuple[_Text, ...] | None = None
    forwarded: tuple[int, ...] = ()
    waits: bool = False


@dataclass(frozen=True)
class Membership(Message):
    """Agent to worker client, first message: the worker's identity and the settings of the run.

    Coordinator to agent, too, for a script that was started early.

    Attributes:
        index: index of the worker.
        name: name of the worker.
        addresses: addresses of all workers' servers, as "host:port".
        payload: bytes that the chief sends to every worker.
        stop_timeout: time between SIGTERM and SIGKILL if the script has to end itself.
        silence_timeout: time without a heartbeat of the agent after which the script ends itself.
        pickled_code: pickled code of the chief's script that is in no file; usually empty.
        on_preempt: True if the chief saves when the worker receives SIGTERM; the first SIGTERM does not end the worker.
    """

    index: int
    name: _Text
    addresses: tuple[_Text, ...]
    payload: Base64UrlBytes
    stop_timeout: float
    silence_timeout: float
    pickled_code: Base64UrlBytes = b""
    on_preempt: bool = False


@dataclass(frozen=True)
class Joined(Message):
    """Worker client to agent to coordinator: the script has joined the run."""


@dataclass(frozen=True)
class Leaving(Message):
    """Worker client or agent to coordinator: received SIGTERM, which announces that the machine goes away."""


@dataclass(frozen=True)
class Done(Message):
    """Worker client to agent to coordinator: the script has succeeded and waits for the other workers."""


class Doing(enum.StrEnum):
    """Activity of a worker's script."""

    JOINING = "joining"  # chief only: waits in its first step for the other workers to reach theirs
    STEPPING = "stepping"  # in a step, or in another call that may wait for other workers
    ELSE = "else"  # between steps
    DONE = "done"  # ended


@dataclass(frozen=True)
class ProgressRequest(Message):
    """Coordinator to agent to worker client: request for `Progress`. A stopped process does not answer.

    Attributes:
        is_starting: True if the script may not have reached its first step. Then the agent answers: there may be no
            worker client yet, or an import, a read or tracing may block the script's other threads for long.
    """

    is_starting: bool = False


@dataclass(frozen=True)
class Progress(Message):
    """Worker client to agent to coordinator: progress of the script.

    Attributes:
        doing: activity of the script.
        since: duration of that activity so far.
        processor: CPU time that its process has used so far.
        queued: time that its threads have waited for a processor so far.
        calls: number of collective calls that the script has reached, each of which needs all workers; None if workers
            may make different numbers of them.
    """

    doing: Doing
    since: float
    processor: float
    queued: float = 0.0
    calls: int | None = None

    @classmethod
    def of_this_process(cls, doing: Doing, began: float, calls: int | None = None) -> Progress:
        """Returns the progress of this process, whose activity started at `began`, a time of `time.monotonic`."""
        return cls(doing, time.monotonic() - began, time.process_time(), _queued(), calls)


def _queued() -> float:
    """Returns the seconds that this process's running threads have waited for a processor."""
    nanoseconds = 0
    for file in Path("/proc/self/task").glob("*/schedstat"):
        with contextlib.suppress(OSError, IndexError, ValueError):  # a thread that has ended, or a kernel without it
            nanoseconds += int(file.read_text().split()[1])
    return nanoseconds / 1e9


@dataclass(frozen=True)
class ChiefText(Message):
    """Coordinator to agent to worker client: text from the chief before the servers are connected; read in order.

    Attributes:
        text: the text.
    """

    text: _Text


@dataclass(frozen=True)
class ChiefWaits(Message):
    """Coordinator to agent to worker client: the chief's script waits in its first step for the other workers."""


@dataclass(frozen=True)
class Release(Message):
    """Coordinator to agent to worker client: all workers are done, the process may end."""


@dataclass(frozen=True)
class Stop(Message):
    """Coordinator to agent: end the script now.

    Attributes:
        reason: reason of the failure that ends the run; empty if nothing is wrong.
        worker: name of the worker that has failed; empty if none has.
        last_lines: the last lines that it printed.
        is_last: False if another `Stop` follows, once the chief knows if the run starts again. The agent then ends the
            script, and goes on.
        starts_again: True if the run starts again, and the process of this agent is to join it again.
    """

    reason: _Text = ""
    worker: _Text = ""
    last_lines: tuple[_Text, ...] = ()
    is_last: bool = True
    starts_again: bool = False


@dataclass(frozen=True)
class Notice(Message):
    """Chief to the agent of a process that a scheduler has started: a text for the process's output.

    Attributes:
        text: the text.
    """

    text: _Text


@dataclass(frozen=True)
class Line(Message):
    """Agent to coordinator: a line that the script printed.

    Attributes:
        stream: "stdout" or "stderr".
        text: the line without its line ending.
    """

    stream: str
    text: str


@dataclass(frozen=True)
class Exited(Message):
    """Agent to coordinator, last message: all processes of the script have ended.

    Attributes:
        status: exit status; a negative one is the number of a signal.
        reason: reason of the end of a function, which has no exit status of its own; empty for a script.
    """

    status: int
    reason: _Text = ""


@dataclass(frozen=True)
class Heartbeat(Message):
    """In both directions over SSH, and agent to worker client: the sender is alive."""


@dataclass(frozen=True)
class Lost(Message):
    """Relay or agent to coordinator, last message: the machine or the script cannot be reached.

    Attributes:
        problem: the problem, its reason and the fix.
        is_away: True if the machine only does not answer, or the process that a scheduler has started there has ended;
            False if it has refused something.
    """

    problem: _Text
    is_away: bool = False
