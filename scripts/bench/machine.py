"""The conditions of a measurement: date, versions, and the machine."""

from __future__ import annotations

import datetime
import os
import pathlib
import platform
from importlib import metadata

from autodist.versions import VERSION

PACKAGES = ("tensorflow", "keras")


def made_with() -> dict[str, str | int | float]:
    """Returns the state of this machine; the load is the mean number of runnable processes over 15 minutes."""
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "python": platform.python_version(),
        "autodist": VERSION,
        **{name: metadata.version(name) for name in PACKAGES},
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[2], 1),
    }


def _processor() -> str:
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
