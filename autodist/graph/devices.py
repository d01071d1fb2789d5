"""Names of TensorFlow's devices in a run."""

from __future__ import annotations


def task_of(worker: int, workers: int) -> str:
    """The device prefix of a worker; a single worker needs no server, and TensorFlow calls it localhost."""
    return f"/job:{'worker' if workers > 1 else 'localhost'}/replica:0/task:{worker}"


def cpu_of(worker: int, workers: int) -> str:
    """The CPU of a worker."""
    return f"{task_of(worker, workers)}/device:CPU:0"
