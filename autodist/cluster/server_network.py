"""The network between the workers' TensorFlow servers: their addresses, encryption, and firewalls of their ports.

TensorFlow's servers listen on all interfaces, without a password and without encryption, and cannot do otherwise.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from autodist.cluster.addresses import host_and_port, is_loopback, resolved
from autodist.cluster.firewall import Firewall, commands_to_drop
from autodist.cluster.forwards import ForwardConnection, Forwards
from autodist.cluster.protocol import Facts
from autodist.resources import ResourceSpec
from autodist.waits import Condition

_log = logging.getLogger("autodist.cluster")

_of_this_process: list[Firewall] = []
"""The firewalls of this process's server, which cannot be stopped: they exist until the process ends."""


class ServerNetwork:
    """The connections between the servers of a run, from `open` to `close`.

    Args:
        spec: the machines.
        changed: condition that guards the connections.
        on_lost: called under `changed` with the name of a worker and a reason, when its forwards have ended.
    """

    def __init__(self, spec: ResourceSpec, changed: Condition, on_lost: Callable[[str, str], None]) -> None:
        self._spec = spec
        self._forwards = Forwards(spec, changed, self._note_end) if spec.encrypt else None
        self._on_lost = on_lost
        self._facts: Sequence[Facts] = ()
        self._ports: list[int] = []
        self._views: list[tuple[str, ...]] = []

    @property
    def sets_firewall(self) -> bool:
        """True if a firewall is set on each machine where that is permitted."""
        return self._spec.firewall == "auto"

    def open(
        self, facts: Sequence[Facts], environment: Mapping[str, str] | None, is_stopped: Callable[[], bool]
    ) -> None:
        """Connects the machines, and sets the firewall of the chief's port.

        Args:
            facts: the facts of each worker's machine; all have a port.
            environment: environment variables of programs started on this machine; None for those of this process.
            is_stopped: returns True if the run was ended meanwhile.

        Raises:
            ClusterError: lists each machine whose ports cannot be forwarded, with the reason and the fix.
            FirewallError: the firewall of the chief's port cannot be set.
        """
        self._facts = facts
        self._ports = [answer.port for answer in facts if answer.port is not None]
        if self._forwards is None:
            self._views = [self._real_addresses] * len(facts)
        else:
            self._views = self._forwards.open(self._ports, environment, is_stopped)
        admitted = self.admitted_to(0)
        if admitted is not None:
            _of_this_process.append(Firewall(self._ports[0], admitted))

    def addresses_for(self, worker: int) -> tuple[str, ...]:
        """Returns "host:port" of every worker's server, by the worker's index, as one worker reaches it."""
        return self._views[worker] if self._views else ()

    def admitted_to(self, worker: int) -> tuple[str, ...] | None:
        """Returns the addresses that may connect to a worker's port; None if no firewall is set."""
        if not self.sets_firewall or self._facts[worker].no_firewall is not None:
            return None
        return self._admitted

    def forwarded_to(self, worker: int) -> tuple[int, ...]:
        """Returns the ports on a worker's machine that lead to the servers of other machines."""
        return () if self._forwards is None else self._forwards.ports_on(worker)

    def warn_of_open_ports(self) -> None:
        """Logs the ports that other machines can reach, and the commands that close them."""
        open_ports = {worker.index for worker in self._spec.workers if self.admitted_to(worker.index) is None}
        if not open_ports or all(is_loopback(worker.node.address) for worker in self._spec.workers):
            return
        _log.warning(
            "TensorFlow's servers listen on all network interfaces without authentication: anyone who reaches the "
            "ports of %s can run code there. %s",
            ", ".join(self._real_addresses[worker] for worker in sorted(open_ports)), self._how_to_close(open_ports),
        )  # fmt: skip

    def close(self) -> None:
        """Ends the forwards. The firewall of the chief's port stays until this process ends."""
        if self._forwards is not None:
            self._forwards.close()

    @property
    def _real_addresses(self) -> tuple[str, ...]:
        return tuple(
            host_and_port(worker.node.address, port)
            for worker, port in zip(self._spec.workers, self._ports, strict=True)
        )

    @property
    def _admitted(self) -> tuple[str, ...]:
        """The addresses of all machines; with forwards, none: all connections come over `lo`."""
        if self._forwards is not None:
            return ()
        named = (address for node in self._spec.nodes for address in resolved(node.address))
        found = {*named, *(address for answer in self._facts for address in answer.interfaces)}
        return tuple(sorted(address for address in found if not is_loopback(address)))

    def _how_to_close(self, workers: set[int]) -> str:
        if not self.sets_firewall:
            return (
                "Use a firewall that admits only the workers' machines; with root, `firewall: auto` in the YAML sets "
                "one for the time of the run."
            )
        lines = [
            f"{self._spec.workers[index].node.address}: {command}"
            for index in sorted(workers)
            for command in commands_to_drop(str(self._ports[index]), self._admitted)
        ]
        reason, fixed = self._facts[min(workers)].no_firewall, ""
        if any(self._spec.workers[index].port is None for index in workers):
            fixed = "Set `port` for the nodes, so that each run has the same ports. "
        return f"`firewall: auto` has set no firewall there: {reason}. {fixed}Run as root:\n  " + "\n  ".join(lines)

    def _note_end(self, connection: ForwardConnection) -> None:
        assert connection.lost is not None, "it has ended"
        self._on_lost(connection.first_worker.name, f"was lost: {connection.lost.problem}")
