"""Names of TensorFlow devices in a run."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import tensorflow as tf

Home = Callable[[int, tf.DType, str | None], str]
"""Returns the device on which a worker keeps a variable of a dtype: the given one of its devices; None: the first."""


def task_of(worker: int, workers: int) -> str:
    """Returns the device prefix of a worker; a single worker needs no server, and TensorFlow calls it localhost."""
    return f"/job:{'worker' if workers > 1 else 'localhost'}/replica:0/task:{worker}"


def cpu_of(worker: int, workers: int) -> str:
    """Returns the CPU device of a worker."""
    return f"{task_of(worker, workers)}/device:CPU:0"


def device_of(worker: int, workers: int, device: str) -> str:
    """Returns TensorFlow's full name of a worker's device ("gpu:1").

    A worker's CPU replicas share one TensorFlow device, with its memory and threads.
    """
    kind, _, index = device.partition(":")
    return f"{task_of(worker, workers)}/device:{'CPU:0' if kind == 'cpu' else f'GPU:{index}'}"


def home_of(worker: int, workers: int, first_device: str, dtype: tf.DType) -> str:
    """Returns the device for a worker's variable: its first replica's; the CPU for counters, which it reads."""
    return device_of(worker, workers, first_device) if dtype.is_floating else cpu_of(worker, workers)


def of_no_task(definition: tf.compat.v1.GraphDef) -> tf.compat.v1.GraphDef:
    """Removes the tasks of a cluster from all devices of a graph, in place, and keeps the kind of device.

    A script may name tasks of its own cluster ("/job:ps/task:0"), and TensorFlow 1 optimizers use the device of their
    variable in this process. Kernels decide on which worker a node runs.
    """
    bodies = (function.node_def for function in definition.library.function)
    known = {"": ""}
    for node in itertools.chain(definition.node, *bodies):
        if node.device not in known:
            spec = tf.DeviceSpec.from_string(node.device)
            known[node.device] = spec.replace(job=None, replica=None, task=None).to_string()
        if known[node.device] != node.device:
            node.device = known[node.device]
    return definition
