"""Forwards: SSH connections that carry what the workers' TensorFlow servers send to one another.

The chief has a connection to each other machine. For each server on another machine, it has a port on the chief's
machine that leads there; on each other machine, it has a port for each server elsewhere, which leads to the chief's
machine, and from there to the server. So every machine needs only the logins that the run has anyway, and traffic
between two machines that are not the chief's passes through the chief's machine. All these ports are on loopback.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from autodist.cluster.addresses import host_and_port
from autodist.cluster.agent_connection import AgentConnection
from autodist.cluster.ports import ReservedPort, reserve_port
from autodist.cluster.preflight import raise_lost
from autodist.cluster.protocol import Lost, Message
from autodist.cluster.ssh_settings import Forwarded, ForwardOrder
from autodist.cluster.timeouts import POLL_INTERVAL, Stopwatch, wait_for
from autodist.cluster.transport import ssh_settings, start_relay
from autodist.errors import ClusterError
from autodist.resources import Node, ResourceSpec, Worker
from autodist.waits import Condition

_LOOPBACK = "127.0.0.1"
_CLOSE_LIMIT = 5.0


class ForwardConnection(AgentConnection):
    """The channel to the relay process that forwards the ports of one machine.

    Args:
        first_worker: the first worker there.
        order: the order of the relay.
        environment: environment variables of the relay; None for those of this process.
        changed: condition that guards the attributes, and is notified of their changes.
        on_lost: called under `changed`, once, when the relay has ended.

    Attributes:
        ports: the ports there; None until they are forwarded.
        lost: the reason that the relay ended; None while it runs.
    """

    def __init__(
        self,
        first_worker: Worker,
        order: ForwardOrder,
        environment: Mapping[str, str] | None,
        changed: Condition,
        on_lost: Callable[[ForwardConnection], None],
    ) -> None:
        self.first_worker = first_worker
        self.ports: tuple[int, ...] | None = None
        self.lost: Lost | None = None
        self._changed, self._on_lost = changed, on_lost
        super().__init__(f"forwards-{first_worker.name}", start_relay("forwards", order, 1, environment)[1][0])

    def _handle(self, message: Message) -> None:
        with self._changed:
            match message:
                case Forwarded(ports):
                    self.ports = ports
                case Lost() if self.lost is None:
                    self.lost = message
                    self._on_lost(self)
            self._changed.notify_all()


class Forwards:
    """The forwards of a run, from `open` to `close`.

    Args:
        spec: the machines.
        changed: condition that guards the connections.
        on_lost: called under `changed`, once for each machine, when its forwards have ended.
    """

    def __init__(self, spec: ResourceSpec, changed: Condition, on_lost: Callable[[ForwardConnection], None]) -> None:
        self._spec, self._changed, self._on_lost = spec, changed, on_lost
        self._nodes: list[Node | None] = []
        self._reserved: dict[int, ReservedPort] = {}
        self._connections: dict[str, ForwardConnection] = {}

    def open(
        self, ports: Sequence[int], environment: Mapping[str, str] | None, is_stopped: Callable[[], bool]
    ) -> list[tuple[str, ...]]:
        """Forwards the ports of all workers' servers; returns the addresses of all servers as each worker reaches them.

        Args:
            ports: the port of each worker's server on its own machine.
            environment: environment variables of the processes that forward; None for those of this process.
            is_stopped: returns True if the run was ended meanwhile.

        Raises:
            ClusterError: lists each machine whose ports cannot be forwarded, with the reason and the fix.
        """
        far = {node for node in self._spec.nodes if self._spec.ssh_group(node) is not None}
        self._nodes = [worker.node if worker.node in far else None for worker in self._spec.workers]
        for index, node in enumerate(self._nodes):
            if node is not None:
                self._reserved[index] = reserve_port(None)
                self._reserved[index].share()
        at_chief = [self._reserved[index].port if index in self._reserved else port for index, port in enumerate(ports)]
        try:
            for node in dict.fromkeys(node for node in self._nodes if node is not None):
                about = self._order(node, ports, at_chief), environment, self._changed, self._on_lost
                first = next(worker for worker in self._spec.workers if worker.node == node)
                self._connections[node.address] = ForwardConnection(first, *about)
            self._wait_until_open(is_stopped)
        except BaseException:
            self.close()  # the run may have been ended meanwhile, before all connections were there
            raise
        return [self._seen_from(node, ports, at_chief) for node in self._nodes]

    def ports_on(self, worker: int) -> tuple[int, ...]:
        """Returns the ports on a worker's machine that its SSH server has opened."""
        node = self._nodes[worker]
        return () if node is None else self._ports_of(node)

    def why_lost(self, node: Node) -> str | None:
        """Returns the reason that the ports of a machine are not forwarded any more; None if there is none."""
        connection = self._connections.get(node.address)
        return None if connection is None or connection.lost is None else connection.lost.problem

    def close(self) -> None:
        """Ends all connections, and with them the forwards."""
        connections, stopwatch = list(self._connections.values()), Stopwatch()
        for connection in connections:
            connection.end_input()
        for connection in connections:
            while not connection.wait(POLL_INTERVAL) and stopwatch.read() < _CLOSE_LIMIT:
                pass
            connection.close()
        for reserved in list(self._reserved.values()):
            reserved.release()

    def _ports_of(self, node: Node) -> tuple[int, ...]:
        ports = self._connections[node.address].ports
        assert ports is not None, "`open` has waited for them"
        return ports

    def _order(self, node: Node, ports: Sequence[int], at_chief: Sequence[int]) -> ForwardOrder:
        settings = ssh_settings(self._spec, node)
        assert settings is not None, "the machine is reached over SSH"
        own = [index for index, other in enumerate(self._nodes) if other == node]
        return ForwardOrder(
            settings,
            self._spec.silence_timeout,
            to_machine=tuple((at_chief[index], ports[index]) for index in own),
            from_machine=tuple(port for index, port in enumerate(at_chief) if index not in own),
        )

    def _seen_from(self, node: Node | None, ports: Sequence[int], at_chief: Sequence[int]) -> tuple[str, ...]:
        """Returns the addresses of all servers on a machine; None: the chief's."""
        if node is None:
            return tuple(host_and_port(_LOOPBACK, port) for port in at_chief)
        elsewhere = iter(self._ports_of(node))
        return tuple(
            host_and_port(_LOOPBACK, port if other == node else next(elsewhere))
            for other, port in zip(self._nodes, ports, strict=True)
        )

    def _wait_until_open(self, is_stopped: Callable[[], bool]) -> None:
        connections = self._connections.values()
        limit = self._spec.reach_timeout + self._spec.connect_timeout
        with self._changed:
            wait_for(self._changed, lambda: is_stopped() or all(one.ports or one.lost for one in connections), limit)
            if is_stopped():
                raise ClusterError("the run was ended before its workers were started")
            late = Lost(f"its ports are not forwarded within {limit:g} s; raise `reach_timeout`", is_away=True)
            lost = {one.first_worker.name: one.lost or late for one in connections if one.lost or not one.ports}
        raise_lost(lost)
