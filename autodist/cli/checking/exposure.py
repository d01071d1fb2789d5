"""The ports that are open while a run trains, and the firewall rules that close them.

TensorFlow's servers listen on all interfaces, whatever address a cluster names, and require no password.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence

import pydantic

from autodist.cli.checking.check_machines import CheckedMachine
from autodist.cluster.addresses import is_loopback, resolved
from autodist.cluster.firewall import commands_to_drop
from autodist.resources import ResourceSpec

ANY_FREE_PORT = "20000-31999"
"""The range of ports used if the YAML names none (`autodist.cluster.ports`)."""


class Exposure(pydantic.BaseModel):
    """The open ports of one machine.

    Attributes:
        machine: its address.
        ports: the ports of its workers' servers, in the syntax of nftables.
        open_to: each address of the machine with its interface; without a firewall, anyone who reaches it can connect.
        is_public: True if one of these addresses is a public internet address.
        commands: nftables commands that admit only the machines of the cluster, for nftables' usual chain.
    """

    machine: str
    ports: str
    open_to: tuple[str, ...]
    is_public: bool
    commands: tuple[str, ...]

    def text(self) -> str:
        """Describes the exposure in one or two sentences."""
        where = ", ".join(self.open_to) or "no network"
        warning = " At least one is an address of the internet." if self.is_public else ""
        return f"port{'s' if '-' in self.ports else ''} {self.ports}: open on {where} to anyone.{warning}"


def exposure_of(
    checked: CheckedMachine, others: Iterable[CheckedMachine], spec: ResourceSpec | None = None
) -> Exposure | None:
    """Returns the open ports of a machine.

    None if it was not reached, if it is alone with one worker, without a server, or if the run sets its firewall.

    Args:
        checked: the check of the machine.
        others: the checks of the other machines.
        spec: the machines, with the keys `encrypt` and `firewall`; None: without these keys.
    """
    others = list(others)
    if checked.machine is None or (len(checked.workers) == 1 and not others):
        return None
    if spec is not None and spec.firewall == "auto" and checked.machine.facts.no_firewall is None:
        return None
    admitted = [] if spec is not None and spec.encrypt else [other.name for other in others]
    interfaces = checked.machine.hardware.interfaces
    ports = _ports(checked)
    return Exposure(
        machine=checked.name,
        ports=ports,
        open_to=tuple(f"{interface.address} ({interface.name})" for interface in interfaces),
        is_public=any(ipaddress.ip_interface(interface.address).is_global for interface in interfaces),
        commands=tuple(_commands(ports, admitted)),
    )


def _ports(checked: CheckedMachine) -> str:
    first = checked.node.port
    if first is None:
        return ANY_FREE_PORT
    last = first + checked.node.workers - 1
    return str(first) if first == last else f"{first}-{last}"


def _commands(ports: str, others: Sequence[str]) -> list[str]:
    """Returns commands that drop connections to the ports from anywhere else; a name without an address stays."""
    others = [other for other in others if not is_loopback(other)]
    return commands_to_drop(ports, [str(address) for other in others for address in resolved(other) or [other]])
