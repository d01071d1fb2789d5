"""What this machine has: cores, memory, disk, GPUs, and the addresses under which others may reach it."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import math
import os
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pydantic

from autodist.cli.checking.protocol import GPU, Hardware, Interface, SeenGPUs

_DRIVER_LIMIT, _TENSORFLOW_LIMIT = 20.0, 60.0
"""In seconds: a driver that hangs must not hang the check."""

_CGROUP = Path("/sys/fs/cgroup")
_SIOCGIFADDR, _SIOCGIFNETMASK = 0x8915, 0x891B


def find_hardware(directory: str) -> Hardware:
    """What this machine has.

    Args:
        directory: of the file system that counts; the home directory's, if it is not there.
    """
    memory, memory_free = _memory()
    disk, disk_free = _disk(directory)
    return Hardware(
        cores=_cores(), memory=memory, memory_free=memory_free, disk=disk, disk_free=disk_free, gpus=tuple(_gpus()),
        interfaces=tuple(_interfaces()),
    )  # fmt: skip


def see_gpus() -> SeenGPUs:
    """What TensorFlow sees here, in a process of its own: it takes the memory of the GPUs that it looks at."""
    command = [sys.executable, "-P", "-m", "autodist.cli.checking.seen_gpus"]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_TENSORFLOW_LIMIT, check=False
        )
    except subprocess.TimeoutExpired:
        return SeenGPUs(count=0, reason=f"it did not say so within {_TENSORFLOW_LIMIT:g} s")
    try:
        return SeenGPUs.model_validate_json(done.stdout.splitlines()[-1])
    except (IndexError, pydantic.ValidationError):
        said = done.stderr.decode(errors="replace").strip().splitlines()
        return SeenGPUs(count=0, reason=said[-1] if said else f"it ended with status {done.returncode}")


def _cores() -> int:
    """How many cores the machine has or, if that is fewer, this process or its container may use."""
    cores = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):
        quota, period = (_CGROUP / "cpu.max").read_text().split()
        cores = min(cores, max(1, math.ceil(int(quota) / int(period))))
    return cores


def _memory() -> tuple[int, int]:
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
    return total, free


def _disk(directory: str) -> tuple[int, int]:
    for place in (directory, os.path.expanduser("~")):
        with contextlib.suppress(OSError):
            usage = shutil.disk_usage(place)
            return usage.total, usage.free
    return 0, 0


def _gpus() -> Iterator[GPU]:
    command = ["nvidia-smi", "--query-gpu=memory.total,name", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_DRIVER_LIMIT, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return  # no driver, or none that works: TensorFlow's own reason is told where GPUs are asked for
    for line in said.decode(errors="replace").splitlines():
        memory, _, name = line.partition(", ")
        yield GPU(name=name.strip(), memory=int(memory) * 1024**2 if memory.strip().isdecimal() else 0)


def _interfaces() -> Iterator[Interface]:
    for _, name in socket.if_nameindex():
        if name == "lo":
            continue
        address = _address_of(name)
        if address is not None:
            yield Interface(name=name, address=address)
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, _, length, _, _, name = line.split()
            found = ipaddress.ip_interface((int(digits, 16).to_bytes(16, "big"), int(length, 16)))
            if name != "lo" and not found.ip.is_link_local:
                yield Interface(name=name, address=str(found))


def _address_of(interface: str) -> str | None:
    """The first IPv4 address of an interface; None if it has none."""
    asked = struct.pack("256s", interface.encode())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket, contextlib.suppress(OSError):
        address, mask = (
            socket.inet_ntoa(fcntl.ioctl(any_socket, what, asked)[20:24]) for what in (_SIOCGIFADDR, _SIOCGIFNETMASK)
        )
        return str(ipaddress.ip_interface(f"{address}/{mask}"))
    return None
