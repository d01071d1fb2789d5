"""The hardware of this machine, within the limits of its container."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import math
import os
import socket
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_SIOCGIFADDR, _SIOCGIFNETMASK = 0x8915, 0x891B


@dataclass(frozen=True)
class MachineMemory:
    """Memory in bytes; 0 if it is not known.

    Attributes:
        total: what the processes of this container or machine may use.
        free: the part of `total` that is available.
        swap: the machine's swap space.
    """

    total: int
    free: int
    swap: int

    @staticmethod
    def now() -> MachineMemory:
        found = {}
        with contextlib.suppress(OSError, ValueError):
            for line in Path("/proc/meminfo").read_text().splitlines():
                name, _, value = line.partition(":")
                found[name] = int(value.split()[0]) * 1024
        total, free = found.get("MemTotal", 0), found.get("MemAvailable", 0)
        with contextlib.suppress(OSError, ValueError):
            limit = int((_CGROUP / "memory.max").read_text())
            if limit < total:
                total, free = limit, min(free, limit - int((_CGROUP / "memory.current").read_text()))
        return MachineMemory(total, free, found.get("SwapTotal", 0))


def available_cores() -> int:
    """Returns the number of cores that this process may use."""
    cores = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):
        quota, period = (_CGROUP / "cpu.max").read_text().split()
        cores = min(cores, max(1, math.ceil(int(quota) / int(period))))
    return cores


def query_gpus(fields: str, limit: float) -> list[str]:
    """Returns the driver's line of fields for each GPU; none if it does not answer within `limit` seconds."""
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=limit, check=True)
    except (subprocess.SubprocessError, OSError):
        return []
    return done.stdout.decode(errors="replace").splitlines()


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
