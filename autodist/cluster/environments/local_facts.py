"""What this process has: its cores and GPUs."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable

from autodist.cluster.environments.handshake import Hello
from autodist.cluster.environments.launcher_env import ADDRESS, Environment, Given

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_LIMIT = 120.0  # seconds, for TensorFlow to be imported from a network drive
_COUNT = "import tensorflow; print('gpus', len(tensorflow.config.list_physical_devices('GPU')))"


def hello_of(given: Given, environment: Environment, count_gpus: Callable[[], int]) -> Hello:
    """The `Hello` of this process.

    Args:
        given: what it knows of its cluster.
        environment: variables of this process.
        count_gpus: how many GPUs its TensorFlow sees; asked where there are some.
    """
    visible = visible_gpus(_installed_gpus(), environment.get(_VISIBLE))
    return Hello(
        given.index,
        given.count,
        socket.gethostname(),
        environment.get(ADDRESS) or None,
        tuple(sorted(os.sched_getaffinity(0))),
        given.cores,
        visible[: count_gpus()] if visible else (),
    )


def visible_gpus(installed: tuple[str, ...], visible: str | None) -> tuple[str, ...]:
    """Those of a machine's GPUs that CUDA shows to a process.

    >>> visible_gpus(("GPU-a", "GPU-b", "GPU-c"), "2,GPU-a")
    ('GPU-c', 'GPU-a')

    Args:
        installed: names of all, in order.
        visible: what CUDA_VISIBLE_DEVICES is; None: it is not set.
    """
    if visible is None:
        return installed
    found = []
    for item in visible.split(","):
        name = item.strip()
        number = int(name) if name.isascii() and name.isdecimal() else None
        match = [gpu for at, gpu in enumerate(installed) if at == number or (name and gpu.startswith(name))]
        if len(match) != 1:
            break  # as CUDA does: what comes after one that is not there is not seen either
        found += match
    return tuple(found)


def count_gpus_apart() -> int:
    """How many GPUs TensorFlow sees, asked in a process of its own: this one does without TensorFlow."""
    try:
        asked = subprocess.run(
            [sys.executable, "-P", "-c", _COUNT], capture_output=True, text=True, timeout=_LIMIT, check=True
        )
    except (subprocess.SubprocessError, OSError):
        return 0
    return next((int(line.split()[1]) for line in asked.stdout.splitlines() if line.startswith("gpus ")), 0)


def _installed_gpus() -> tuple[str, ...]:
    """UUIDs of the GPUs that this process may use, before CUDA_VISIBLE_DEVICES."""
    try:
        asked = subprocess.run(
            ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=_LIMIT, check=True,
        )  # fmt: skip
    except (subprocess.SubprocessError, OSError):
        return ()
    return tuple(line.strip() for line in asked.stdout.splitlines() if line.startswith("GPU-"))
