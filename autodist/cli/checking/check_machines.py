"""Checks all machines of a cluster at the same time."""

from __future__ import annotations

import concurrent.futures
import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from autodist.cli.checking.messages import (
    ConnectAnswer,
    ConnectRequest,
    MachineAnswer,
    MachineRequest,
    TimeAnswer,
    TimeRequest,
)
from autodist.cluster.addresses import host_and_port
from autodist.cluster.agent_connection import RequestConnection
from autodist.cluster.forwards import Forwards
from autodist.cluster.protocol import Message
from autodist.cluster.transport import Channel, open_channels
from autodist.errors import ClusterError
from autodist.resources import Node, ResourceSpec, Worker
from autodist.runtime.clocks import ClockOffset, measure_offset
from autodist.waits import Condition

_Answer = TypeVar("_Answer", bound=Message)

PACKAGES = ("keras",)
"""Packages, besides TensorFlow and AutoDist, whose versions must be equal on every machine."""

CONNECT_LIMIT = 5.0
"""Seconds for connecting from one machine to another."""

_RETRY_LIMIT = 5.0
"""Seconds to wait for a machine that does not answer; the user can simply repeat the check."""

_INSPECT_LIMIT, _CLOCK_LIMIT = 120.0, 10.0

_ANY_PORT = 9
"""Nothing connects to it: the forwards are opened and ended."""


@dataclass(frozen=True)
class CheckedMachine:
    """The result of checking one machine.

    Attributes:
        node: the machine in the YAML.
        workers: the workers of the node.
        machine: answer of the machine; None if it was not reached.
        problem: the reason that the machine was not reached, or stopped answering.
        clock: offset of its clock from the chief's clock; None if unknown.
        unreachable: addresses of workers that this machine cannot connect to, with the reasons.
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
    spec: ResourceSpec, script: str | None, directory: str | None, show: Callable[[str], None] = lambda what: None
) -> list[CheckedMachine]:
    """Checks all machines at the same time. A machine that does not answer does not delay the others.

    Args:
        spec: the machines.
        script: path of the script, the same on all machines, if it is known.
        directory: working directory of the script.
        show: called with the current activity.
    """
    checks = [_MachineCheck(spec, node, script, directory) for node in _in_order(spec)]
    pool = concurrent.futures.ThreadPoolExecutor(max_workers=len(checks))
    with pool, contextlib.ExitStack() as connections:
        show(f"reaching {len(checks)} machines")
        for check in checks:
            check.open(connections)
        checked = list(pool.map(_MachineCheck.run, checks))
        # With `encrypt`, no machine connects to a port of another one.
        addresses = () if spec.encrypt else tuple(address for one in checked for address in one.addresses)
        show("trying the ports from each machine to each")
        reached = list(pool.map(lambda check, one: check.reach(one, addresses), checks, checked))
    return _with_forwards(spec, reached) if spec.encrypt else reached


def _with_forwards(spec: ResourceSpec, checked: Sequence[CheckedMachine]) -> list[CheckedMachine]:
    """Opens the forwards of `encrypt`, if every machine was reached; the problem of a machine is why it has none."""
    if any(one.machine is None for one in checked):
        return list(checked)
    ports = {one.node: iter(one.machine.ports) for one in checked if one.machine is not None}
    forwards = Forwards(spec, Condition(), lambda connection: None)
    try:
        forwards.open([next(ports[worker.node]) or _ANY_PORT for worker in spec.workers], None, lambda: False)
    except ClusterError:
        return [replace(one, problem=one.problem or forwards.why_lost(one.node)) for one in checked]
    forwards.close()
    return list(checked)


class _MachineCheck:
    """The check of one machine."""

    def __init__(self, spec: ResourceSpec, node: Node, script: str | None, directory: str | None) -> None:
        self._spec, self._node = spec, node
        self._workers = tuple(worker for worker in spec.workers if worker.node == node)
        ports = tuple(worker.port for worker in self._workers)
        self._request = MachineRequest(
            script=script,
            directory=directory,
            ports=ports,
            packages=PACKAGES,
            counts_gpus=bool(node.gpus),
            sets_firewall=spec.firewall == "auto",
        )
        self._connection: ProbeConnection | None = None

    def open(self, closing: contextlib.ExitStack) -> None:
        limit = str(int(self._spec.reach_timeout + 2 * _INSPECT_LIMIT))
        probe = ("autodist.cli.checking.probe", limit)
        (channel,) = open_channels(self._spec, self._node, 1, *probe, retry_limit=_RETRY_LIMIT)
        self._connection = closing.enter_context(ProbeConnection(channel))

    def run(self) -> CheckedMachine:
        connection = self._connection
        assert connection is not None, "opened before"
        checked = CheckedMachine(self._node, self._workers)
        try:
            connection.read_clock(self._spec.reach_timeout + self._spec.connect_timeout)
            machine = connection.inspect(self._request, _INSPECT_LIMIT)
            clock = measure_offset(lambda: connection.read_clock(_CLOCK_LIMIT))
        except ClusterError as error:
            return replace(checked, problem=str(error))
        return replace(checked, machine=machine, clock=clock)

    def reach(self, checked: CheckedMachine, addresses: Sequence[str]) -> CheckedMachine:
        """Connects from this machine to all reserved ports, including its own."""
        assert self._connection is not None, "opened before"
        if checked.machine is None:
            return checked
        limit = CONNECT_LIMIT * (2 + len(addresses) / 64)
        try:
            reached = self._connection.connect(
                ConnectRequest(addresses=tuple(addresses), limit=CONNECT_LIMIT), limit + 10
            )
        except ClusterError as error:
            return replace(checked, problem=str(error))
        return replace(checked, unreachable=reached.problems)


def _in_order(spec: ResourceSpec) -> list[Node]:
    """Returns the nodes, the chief's first."""
    return list(dict.fromkeys(worker.node for worker in spec.workers))


class ProbeConnection(RequestConnection):
    """A connection to the probe of one machine. In all requests, `limit` is in seconds.

    Args:
        channel: channel to the probe.
    """

    def __init__(self, channel: Channel) -> None:
        super().__init__("probe", channel)

    def inspect(self, request: MachineRequest, limit: float) -> MachineAnswer:
        """Returns the machine's answer.

        Raises:
            ClusterError: it cannot be reached, or does not answer.
        """
        return self._request(request, MachineAnswer, limit)

    def read_clock(self, limit: float) -> float:
        """Returns the machine's time in seconds since 1970."""
        return self._request(TimeRequest(), TimeAnswer, limit).at

    def connect(self, request: ConnectRequest, limit: float) -> ConnectAnswer:
        """Returns the addresses that the machine cannot connect to."""
        return self._request(request, ConnectAnswer, limit)

    def _request(self, request: Message, kind: type[_Answer], limit: float) -> _Answer:
        self.send(request)
        return self.next_answer(kind, limit)
