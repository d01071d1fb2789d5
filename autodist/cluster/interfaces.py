"""The addresses of this machine's network interfaces."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

_SIOCGIFADDR, _SIOCGIFNETMASK = 0x8915, 0x891B


def interface_addresses() -> Iterator[tuple[str, str]]:
    """Yields the name and an address, such as "10.0.0.1/24", of each interface except loopback."""
    for _, name in socket.if_nameindex():
        if name == "lo":
            continue
        address = _address_of(name)
        if address is not None:
            yield name, address
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, _, length, _, _, name = line.split()
            found = ipaddress.ip_interface((int(digits, 16).to_bytes(16, "big"), int(length, 16)))
            if name != "lo" and not found.ip.is_link_local:
                yield name, str(found)


def _address_of(interface: str) -> str | None:
    """Returns the first IPv4 address of an interface; None if it has none."""
    request = struct.pack("256s", interface.encode())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket, contextlib.suppress(OSError):
        address, mask = (
            socket.inet_ntoa(fcntl.ioctl(any_socket, what, request)[20:24]) for what in (_SIOCGIFADDR, _SIOCGIFNETMASK)
        )
        return str(ipaddress.ip_interface(f"{address}/{mask}"))
    return None
