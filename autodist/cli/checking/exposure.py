"""What is open to whom while a run trains, and the firewall line that closes it.

TensorFlow's servers listen on all interfaces, whatever address a cluster names, and ask for no password.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable, Sequence

import pydantic

from autodist.cli.checking.looking import FoundMachine
from autodist.cluster.addresses import is_loopback

ANY_FREE_PORT = "20000-31999"
"""What the ports are taken from where the YAML names none (`autodist.cluster.ports`)."""


class Exposure(pydantic.BaseModel):
    """What of one machine is open to others.

    Attributes:
        machine: its address.
        ports: on which its workers' servers listen, as nftables spells them.
        open_to: who can connect, unless a firewall stands in front: each address of the machine with its interface.
        is_public: whether one of these addresses is the internet's.
        commands: that let nobody connect but the machines of the cluster, with nftables, in its usual chain.
    """

    machine: str
    ports: str
    open_to: tuple[str, ...]
    is_public: bool
    commands: tuple[str, ...]

    def words(self) -> str:
        """In a sentence or two."""
        where = ", ".join(self.open_to) or "no network"
        warning = " At least one is an address of the internet." if self.is_public else ""
        return (
            f"port{'s' if '-' in self.ports else ''} {self.ports}: open on {where}, for whoever reaches them.{warning}"
        )


def exposure_of(found: FoundMachine, others: Iterable[FoundMachine]) -> Exposure | None:
    """What is open on a machine; None where it was not reached, or is alone with one worker and starts no server.

    Args:
        found: of the machine.
        others: of the other machines.
    """
    others = list(others)
    if found.machine is None or (len(found.workers) == 1 and not others):
        return None
    interfaces = found.machine.hardware.interfaces
    ports = _ports(found)
    return Exposure(
        machine=found.name,
        ports=ports,
        open_to=tuple(f"{interface.address} ({interface.name})" for interface in interfaces),
        is_public=any(ipaddress.ip_interface(interface.address).is_global for interface in interfaces),
        commands=tuple(_commands(ports, [other.name for other in others])),
    )


def _ports(found: FoundMachine) -> str:
    first = found.node.port
    if first is None:
        return ANY_FREE_PORT
    last = first + found.node.workers - 1
    return str(first) if first == last else f"{first}-{last}"


def _commands(ports: str, others: Sequence[str]) -> list[str]:
    """Commands that drop what comes to the ports from anywhere else.

    The machine's own workers connect to one another by `lo`, under whichever address.
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
        allowed += lost if version == 4 else []  # a name that cannot be resolved here is left to who runs the command
        admits = f"{selector} != {{ {', '.join(allowed)} }}" if allowed else f"meta nfproto {family}"
        commands.append(f"{base} {admits} drop")
    return commands


def _resolved(host: str) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return [ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in found]
