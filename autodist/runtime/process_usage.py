"""The memory that this process has used, and the bytes that it has sent to the servers of other workers."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import struct
from collections.abc import Collection
from pathlib import Path

_PEAK = re.compile(r"^VmHWM:\s+(\d+) kB$", re.MULTILINE)

_TCP_INFO_BYTES = 256
_ACKNOWLEDGED = struct.Struct("=120xQ")
"""Layout of Linux's `struct tcp_info` up to `tcpi_bytes_acked`."""


def peak_memory() -> int | None:
    """Returns the largest resident memory of this process so far, in bytes; None if the system does not report it.

    `getrusage` also counts the process that has executed this one.
    """
    with contextlib.suppress(OSError):
        found = _PEAK.search(Path("/proc/self/status").read_text())
        return None if found is None else 1024 * int(found[1])
    return None


class SentBytes:
    """Counts the bytes that this process has sent over its connections to and from some ports, and were acknowledged.

    The kernel counts them for each connection. Connections that were closed keep their last count.

    Args:
        ports: the ports of the workers' servers.
    """

    def __init__(self, ports: Collection[int]) -> None:
        self._ports = frozenset(ports)
        self._sent: dict[str, int] = {}
        self._others: dict[str, str] = {}

    def now(self) -> int | None:
        """Returns the bytes sent so far; None if the system does not report them."""
        for descriptor in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError, struct.error):  # it is closed meanwhile, or is no TCP connection
                identity = os.readlink(f"/proc/self/fd/{descriptor}")
                if identity.startswith("socket:") and self._others.get(descriptor) != identity:
                    self._count(descriptor, identity)
        return sum(self._sent.values()) if self._sent else None

    def _count(self, descriptor: str, identity: str) -> None:
        with socket.socket(fileno=os.dup(int(descriptor))) as connection:
            if identity not in self._sent and not self._is_between_servers(connection):
                self._others[descriptor] = identity
                return
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
            self._sent[identity] = _ACKNOWLEDGED.unpack_from(info)[0]

    def _is_between_servers(self, connection: socket.socket) -> bool:
        """Returns True for a connection of the servers; raises OSError for a socket without a connection."""
        if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
            return False
        ends = (connection.getsockname(), connection.getpeername())
        return any(port in self._ports for _, port, *_ in ends)
