"""Detects the cores and GPUs of this process."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable

from autodist.cluster.environments.handshake import Hello
from autodist.cluster.environments.launcher_env import ADDRESS, Environment, GivenCluster
from autodist.cluster.hardware import query_gpus

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_LIMIT = 120.0  # seconds, for TensorFlow to be imported from a network drive
_COUNT = "import tensorflow; print('gpus', len(tensorflow.config.list_physical_devices('GPU')))"


def hello_of(given: GivenCluster, environment: Environment, count_gpus: Callable[[], int]) -> Hello:
    """Returns the `Hello` of this process.

    Args:
        given: its cluster.
        environment: its environment variables.
        count_gpus: returns the number of GPUs that its TensorFlow sees; called if there are any.
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
    """Returns the GPUs of a machine that are visible to a process under CUDA.

    >>> visible_gpus(("GPU-a", "GPU-b", "GPU-c"), "2,GPU-a")
    ('GPU-c', 'GPU-a')

    Args:
        installed: names of all GPUs, in order.
        visible: value of CUDA_VISIBLE_DEVICES; None if it is not set.
    """
    if visible is None:
        return installed
    gpus = []
    for name in map(str.strip, visible.split(",")):
        number = int(name) if name.isascii() and name.isdecimal() else None
        match = [gpu for at, gpu in enumerate(installed) if at == number or (name and gpu.startswith(name))]
        if len(match) != 1:
            break  # as in CUDA: GPUs after one that does not exist are not visible either
        gpus += match
    return tuple(gpus)


def count_gpus_apart() -> int:
    """Returns the number of GPUs that TensorFlow sees, counted in a separate process: this one does not load it."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _COUNT], capture_output=True, text=True, timeout=_LIMIT, check=True
        )
    except (subprocess.SubprocessError, OSError):
        return 0
    return next((int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("gpus ")), 0)


def _installed_gpus() -> tuple[str, ...]:
    """Returns the UUIDs of the machine's GPUs, regardless of CUDA_VISIBLE_DEVICES."""
    return tuple(line.strip() for line in query_gpus("uuid", _LIMIT) if line.startswith("GPU-"))
