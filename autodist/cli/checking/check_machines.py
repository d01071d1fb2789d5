"""Checks all machines of a cluster at the same time."""

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
"""Packages, besides TensorFlow and AutoDist, whose versions must be equal on every machine."""

CONNECT_LIMIT = 5.0
"""Seconds for connecting from one machine to another."""

_PATIENCE = 5.0
"""Seconds to wait for a machine that does not answer; the user can simply repeat the check."""

_LOOK_LIMIT, _TICK_LIMIT = 120.0, 10.0
_TICKS = 8


@dataclass(frozen=True)
class CheckedMachine:
    """The result of checking one machine.

    Attributes:
        node: in the YAML.
        workers: the workers of the node.
        machine: the machine's answer; None: it was not reached.
        problem: the reason why it was not reached, or stopped answering.
        clock: its offset from the chief's clock; None: not known.
        unreachable: by address of a worker, the reason why this machine cannot connect to it.
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
        """Addresses of its workers' ports that could be reserved."""
        ports = () if self.machine is None else self.machine.ports
        return tuple(host_and_port(self.node.address, port) for port in ports if port is not None)


def check_all_machines(
    spec: ResourceSpec, script: str | None, directory: str | None, say: Callable[[str], None] = lambda what: None
) -> list[CheckedMachine]:
    """Checks all machines at the same time. A machine that does not answer does not delay the others.

    Args:
        spec: the machines.
        script: path of the script, the same on all machines, if it is known.
        directory: working directory of the script.
        say: called with the current activity.
    """
    looks = [_MachineCheck(spec, node, script, directory) for node in _in_order(spec)]
    pool = concurrent.futures.ThreadPoolExecutor(max_workers=len(looks))
    with pool, contextlib.ExitStack() as connections:
        say(f"reaching {len(looks)} machines")
        for look in looks:
            look.open(connections)
        checked = list(pool.map(_MachineCheck.run, looks))
        addresses = tuple(address for one in checked for address in one.addresses)
        say("trying the ports from each machine to each")
        return list(pool.map(lambda look, one: look.reach(one, addresses), looks, checked))


class _MachineCheck:
    """The check of one machine."""

    def __init__(self, spec: ResourceSpec, node: Node, script: str | None, directory: str | None) -> None:
        self._spec, self._node = spec, node
        self._workers = tuple(worker for worker in spec.workers if worker.node == node)
        ports = tuple(worker.port for worker in self._workers)
        self._question = MachineQuestion(
            script=script, directory=directory, ports=ports, packages=PACKAGES, counts_gpus=bool(node.gpus)
        )
        self._connection: ProbeConnection | None = None

    def open(self, closing: contextlib.ExitStack) -> None:
        limit = str(int(self._spec.reach_timeout + 2 * _LOOK_LIMIT))
        transport = transport_to(self._spec, self._node, patience=_PATIENCE)
        (channel,) = transport.open(1, "autodist.cli.checking.probe", limit)
        self._connection = closing.enter_context(ProbeConnection(channel))

    def run(self) -> CheckedMachine:
        assert self._connection is not None, "opened before"
        checked = CheckedMachine(self._node, self._workers)
        try:
            self._connection.tick(self._spec.reach_timeout + self._spec.connect_timeout)
            machine = self._connection.look(self._question, _LOOK_LIMIT)
            clocks = [ClockOffset.of(*self._connection.tick(_TICK_LIMIT)) for _ in range(_TICKS)]
        except ClusterError as error:
            return replace(checked, problem=str(error))
        return replace(checked, machine=machine, clock=min(clocks, key=lambda clock: clock.uncertainty))

    def reach(self, checked: CheckedMachine, addresses: Sequence[str]) -> CheckedMachine:
        """Connects from this machine to all reserved ports, including its own."""
        assert self._connection is not None, "opened before"
        if checked.machine is None:
            return checked
        limit = CONNECT_LIMIT * (2 + len(addresses) / 64)
        try:
            reached = self._connection.reach(Reach(addresses=tuple(addresses), limit=CONNECT_LIMIT), limit + 10)
        except ClusterError as error:
            return replace(checked, problem=str(error))
        return replace(checked, unreachable=reached.problems)


def _in_order(spec: ResourceSpec) -> list[Node]:
    """Returns the nodes, the chief's first."""
    return list(dict.fromkeys(worker.node for worker in spec.workers))


_END_LIMIT = 2.0
"""Seconds for a probe to end on its own."""


class ProbeConnection:
    """A connection to the probe of one machine.

    Args:
        channel: to the probe.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._answers: queue.SimpleQueue[Answer | Lost] = queue.SimpleQueue()
        self._errors: list[str] = []
        self._error_reader = threading.Thread(target=self._read_errors, name="autodist-probe-errors", daemon=True)
        self._error_reader.start()
        self._reading = threading.Thread(target=self._read, name="autodist-probe", daemon=True)
        self._reading.start()

    def __enter__(self) -> ProbeConnection:
        return self

    def __exit__(self, *about: object) -> None:
        """Ends the probe."""
        with contextlib.suppress(OSError, ValueError):
            self._channel.stdin.close()
        self._channel.wait(_END_LIMIT)
        self._channel.close()
        for thread, stream in ((self._reading, self._channel.stdout), (self._error_reader, self._channel.stderr)):
            thread.join(_END_LIMIT)
            if not thread.is_alive():
                stream.close()

    def look(self, look: MachineQuestion, limit: float) -> MachineAnswer:
        """Returns the machine's answer. In all requests, `limit` is in seconds.

        Raises:
            ClusterError: it cannot be reached, or does not answer.
        """
        answer = self._request(look, limit)
        assert isinstance(answer, MachineAnswer), "requests are answered in order"
        return answer

    def tick(self, limit: float) -> tuple[float, float, float]:
        """Returns three times in seconds since 1970: request sent, machine's clock, answer received."""
        sent = time.time()
        answer = self._request(Tick(), limit)
        assert isinstance(answer, Tock), "requests are answered in order"
        return sent, answer.at, time.time()

    def reach(self, reach: Reach, limit: float) -> Reached:
        """Returns the addresses that the machine cannot connect to."""
        answer = self._request(reach, limit)
        assert isinstance(answer, Reached), "requests are answered in order"
        return answer

    def _request(self, question: Question, limit: float) -> Answer:
        with contextlib.suppress(OSError, ValueError):  # the reader thread reports a lost connection
            self._channel.stdin.write(line_of(question))
            self._channel.stdin.flush()
        try:
            answer = self._answers.get(timeout=limit)
        except queue.Empty:
            raise ClusterError(
                f"no answer within {limit:g} s; check that the machine is up and not overloaded, or raise "
                "`reach_timeout`"
            ) from None
        if isinstance(answer, Lost):
            raise ClusterError(answer.problem)
        return answer

    def _read(self) -> None:
        for line in self._channel.stdout:
            answer = answer_in(line) or _lost_in(line)
            if answer is not None:
                self._answers.put(answer)
            elif line.strip():
                self._errors.append(line.decode(errors="replace").rstrip())
        self._error_reader.join(1)
        self._answers.put(Lost(why_agent_ended("\n".join(self._errors[-LAST_LINES:]))))

    def _read_errors(self) -> None:
        for line in self._channel.stderr:
            self._errors.append(line.decode(errors="replace").rstrip())


def _lost_in(line: bytes) -> Lost | None:
    """Returns the transport's message about a lost connection, or None."""
    try:
        message = decode(line)
    except ProtocolError:
        return None
    return message if isinstance(message, Lost) else None
