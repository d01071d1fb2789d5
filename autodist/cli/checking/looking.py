"""Looks at all machines of a cluster at once."""

from __future__ import annotations

import concurrent.futures
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autodist.cli.checking.protocol import (
    Answer,
    MachineAnswer,
    MachineQuestion,
    Question,
    Reach,
    Reached,
    Tick,
    Tock,
    answer_in,
    line_of,
)
from autodist.cluster.addresses import host_and_port
from autodist.cluster.failure import LAST_LINES, why_agent_ended
from autodist.cluster.protocol import Lost, ProtocolError, decode
from autodist.cluster.transport import Channel, transport_to
from autodist.errors import ClusterError
from autodist.resources import Node, ResourceSpec, Worker
from autodist.runtime.clocks import ClockOffset

PACKAGES = ("keras",)
"""Beside TensorFlow and AutoDist: what every machine has to have in one version."""

CONNECT_LIMIT = 5.0
"""Seconds for connecting from one machine to another."""

_PATIENCE = 5.0
"""Seconds for a machine that does not answer: whoever checks wants to know, and checks again."""

_LOOK_LIMIT, _TICK_LIMIT = 120.0, 10.0
_TICKS = 8


@dataclass(frozen=True)
class FoundMachine:
    """What was found of one machine.

    Attributes:
        node: in the YAML.
        workers: that run there.
        machine: what it has to say; None: it was not reached.
        problem: why it was not reached, or stopped answering.
        clock: against the chief's; None: not known.
        unreachable: by address of another machine's worker, or of its own, why it cannot be connected to from here.
    """

    node: Node
    workers: tuple[Worker, ...]
    machine: MachineAnswer | None = None
    problem: str | None = None
    clock: ClockOffset | None = None
    unreachable: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.node.address

    @property
    def addresses(self) -> tuple[str, ...]:
        """Of its workers' ports, those that could be kept."""
        ports = () if self.machine is None else self.machine.ports
        return tuple(host_and_port(self.node.address, port) for port in ports if port is not None)


def look_at_all(
    spec: ResourceSpec, script: str | None, directory: str | None, say: Callable[[str], None] = lambda what: None
) -> list[FoundMachine]:
    """Looks at all machines, all at once. What keeps one from answering keeps no other.

    Args:
        spec: the machines.
        script: path of the script, the same everywhere, if it is known.
        directory: where it runs.
        say: told what is being done.
    """
    looks = [_Look(spec, node, script, directory) for node in _in_order(spec)]
    pool = concurrent.futures.ThreadPoolExecutor(max_workers=len(looks))
    with pool, contextlib.ExitStack() as conversations:
        say(f"reaching {len(looks)} machines")
        for look in looks:
            look.open(conversations)
        found = list(pool.map(_Look.run, looks))
        addresses = tuple(address for one in found for address in one.addresses)
        say("trying the ports from each machine to each")
        return list(pool.map(lambda look, one: look.reach(one, addresses), looks, found))


class _Look:
    """A look at one machine."""

    def __init__(self, spec: ResourceSpec, node: Node, script: str | None, directory: str | None) -> None:
        self._spec, self._node = spec, node
        self._workers = tuple(worker for worker in spec.workers if worker.node == node)
        ports = tuple(worker.port for worker in self._workers)
        self._question = MachineQuestion(
            script=script, directory=directory, ports=ports, packages=PACKAGES, counts_gpus=bool(node.gpus)
        )
        self._conversation: Conversation | None = None

    def open(self, closing: contextlib.ExitStack) -> None:
        limit = str(int(self._spec.reach_timeout + 2 * _LOOK_LIMIT))
        transport = transport_to(self._spec, self._node, patience=_PATIENCE)
        (channel,) = transport.open(1, "autodist.cli.checking.probe", limit)
        self._conversation = closing.enter_context(Conversation(channel))

    def run(self) -> FoundMachine:
        assert self._conversation is not None, "it was opened"
        found = FoundMachine(self._node, self._workers)
        try:
            self._conversation.tick(self._spec.reach_timeout + self._spec.connect_timeout)
            machine = self._conversation.look(self._question, _LOOK_LIMIT)
            clocks = [ClockOffset.of(*self._conversation.tick(_TICK_LIMIT)) for _ in range(_TICKS)]
        except ClusterError as error:
            return replace(found, problem=str(error))
        return replace(found, machine=machine, clock=min(clocks, key=lambda clock: clock.uncertainty))

    def reach(self, found: FoundMachine, addresses: Sequence[str]) -> FoundMachine:
        """Tries, from this machine, all ports that are kept, its own too."""
        assert self._conversation is not None, "it was opened"
        if found.machine is None:
            return found
        limit = CONNECT_LIMIT * (2 + len(addresses) / 64)
        try:
            reached = self._conversation.reach(Reach(addresses=tuple(addresses), limit=CONNECT_LIMIT), limit + 10)
        except ClusterError as error:
            return replace(found, problem=str(error))
        return replace(found, unreachable=reached.problems)


def _in_order(spec: ResourceSpec) -> list[Node]:
    """The chief's machine first."""
    return list(dict.fromkeys(worker.node for worker in spec.workers))


_END_LIMIT = 2.0
"""Seconds for a probe to end by itself."""


class Conversation:
    """Asks the probe of one machine.

    Args:
        channel: to the probe.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._answers: queue.SimpleQueue[Answer | Lost] = queue.SimpleQueue()
        self._complaints: list[str] = []
        self._complaining = threading.Thread(target=self._read_complaints, name="autodist-probe-errors", daemon=True)
        self._complaining.start()
        self._reading = threading.Thread(target=self._read, name="autodist-probe", daemon=True)
        self._reading.start()

    def __enter__(self) -> Conversation:
        return self

    def __exit__(self, *about: object) -> None:
        """Ends the probe."""
        with contextlib.suppress(OSError, ValueError):
            self._channel.stdin.close()
        self._channel.wait(_END_LIMIT)
        self._channel.close()
        for thread, stream in ((self._reading, self._channel.stdout), (self._complaining, self._channel.stderr)):
            thread.join(_END_LIMIT)
            if not thread.is_alive():
                stream.close()

    def look(self, look: MachineQuestion, limit: float) -> MachineAnswer:
        """What the machine has to say. As for all questions, `limit` is in seconds.

        Raises:
            ClusterError: it cannot be reached, or does not answer.
        """
        answer = self._ask(look, limit)
        assert isinstance(answer, MachineAnswer), "questions are answered one after the other"
        return answer

    def tick(self, limit: float) -> tuple[float, float, float]:
        """Seconds since 1970: when it was asked here, what the machine said, and when that was heard."""
        asked = time.time()
        answer = self._ask(Tick(), limit)
        assert isinstance(answer, Tock), "questions are answered one after the other"
        return asked, answer.at, time.time()

    def reach(self, reach: Reach, limit: float) -> Reached:
        """Which addresses the machine cannot connect to."""
        answer = self._ask(reach, limit)
        assert isinstance(answer, Reached), "questions are answered one after the other"
        return answer

    def _ask(self, question: Question, limit: float) -> Answer:
        with contextlib.suppress(OSError, ValueError):  # that it has ended is read below
            self._channel.stdin.write(line_of(question))
            self._channel.stdin.flush()
        try:
            answer = self._answers.get(timeout=limit)
        except queue.Empty:
            raise ClusterError(
                f"no answer within {limit:g} s; see whether the machine is up and not overloaded, or raise "
                "`reach_timeout`"
            ) from None
        if isinstance(answer, Lost):
            raise ClusterError(answer.problem)
        return answer

    def _read(self) -> None:
        for line in self._channel.stdout:
            said = answer_in(line) or _lost_in(line)
            if said is not None:
                self._answers.put(said)
            elif line.strip():
                self._complaints.append(line.decode(errors="replace").rstrip())
        self._complaining.join(1)
        self._answers.put(Lost(why_agent_ended("\n".join(self._complaints[-LAST_LINES:]))))

    def _read_complaints(self) -> None:
        for line in self._channel.stderr:
            self._complaints.append(line.decode(errors="replace").rstrip())


def _lost_in(line: bytes) -> Lost | None:
    """What the connection to the machine has to say."""
    try:
        message = decode(line)
    except ProtocolError:
        return None
    return message if isinstance(message, Lost) else None
