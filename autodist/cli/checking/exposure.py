"""The ports that are open while a run trains, and the firewall rules that close them.

TensorFlow's servers listen on all interfaces, whatever address a cluster names, and require no password.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable, Sequence

import pydantic

from autodist.cli.checking.check_machines import CheckedMachine
from autodist.cluster.addresses import is_loopback

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


def exposure_of(checked: CheckedMachine, others: Iterable[CheckedMachine]) -> Exposure | None:
    """Returns the open ports of a machine; None if it was not reached, or is alone with one worker, without a server.

    Args:
        checked: the check of the machine.
        others: the checks of the other machines.
    """
    others = list(others)
    if checked.machine is None or (len(checked.workers) == 1 and not others):
        return None
    interfaces = checked.machine.hardware.interfaces
    ports = _ports(checked)
    return Exposure(
        machine=checked.name,
        ports=ports,
        open_to=tuple(f"{interface.address} ({interface.name})" for interface in interfaces),
        is_public=any(ipaddress.ip_interface(interface.address).is_global for interface in interfaces),
        commands=tuple(_commands(ports, [other.name for other in others])),
    )


def _ports(checked: CheckedMachine) -> str:
    first = checked.node.port
    if first is None:
        return ANY_FREE_PORT
    last = first + checked.node.workers - 1
    return str(first) if first == last else f"{first}-{last}"


def _commands(ports: str, others: Sequence[str]) -> list[str]:
    """Returns commands that drop connections to the ports from anywhere else.

    The machine's own workers connect to one another over `lo`, whatever address they use.
    """
    base = f'nft add rule inet filter input iifname != "lo" tcp dport {ports}'
    others = [other for other in others if not is_loopback(other)]
    if not others:
        return [f"{base} drop"]
    known = {other: _resolved(other) for other in others}
    lost = [other for other, addresses in known.items() if not addresses]
    flat = [address for addresses in known.values() for address in addresses]
    commands = []
    for family, selector, version in (("ipv4", "ip saddr", 4), ("ipv6", "ip6 saddr", 6)):
        allowed = sorted({str(address) for address in flat if address.version == version})
        allowed += lost if version == 4 else []  # the user must replace a name that cannot be resolved here
        admits = f"{selector} != {{ {', '.join(allowed)} }}" if allowed else f"meta nfproto {family}"
        commands.append(f"{base} {admits} drop")
    return commands


def _resolved(host: str) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    try:
        entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return [ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in entries]
