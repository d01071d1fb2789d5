"""The memory of this machine, within the limits of its container."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


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
