"""Names of TensorFlow's devices in a run."""

from __future__ import annotations

import itertools

import tensorflow as tf


def task_of(worker: int, workers: int) -> str:
    """The device prefix of a worker; a single worker needs no server, and TensorFlow calls it localhost."""
    return f"/job:{'worker' if workers > 1 else 'localhost'}/replica:0/task:{worker}"


def cpu_of(worker: int, workers: int) -> str:
    """The CPU of a worker."""
    return f"{task_of(worker, workers)}/device:CPU:0"


def device_of(worker: int, workers: int, device: str) -> str:
    """A device of a worker ("gpu:1") under TensorFlow's full name.

    A worker's CPU replicas run side by side on one TensorFlow device: they share its memory and its threads.
    """
    kind, _, index = device.partition(":")
    return f"{task_of(worker, workers)}/device:{'CPU:0' if kind == 'cpu' else f'GPU:{index}'}"


def home_of(worker: int, workers: int, first_device: str, dtype: tf.DType) -> str:
    """Where a worker keeps a variable: beside its first replica; counters stay on the CPU, where they are read."""
    return device_of(worker, workers, first_device) if dtype.is_floating else cpu_of(worker, workers)


def of_no_task(definition: tf.compat.v1.GraphDef) -> tf.compat.v1.GraphDef:
    """The graph, changed, whose devices name no task of a cluster, but a kind of device alone.

    A script may name those of a cluster of its own ("/job:ps/task:0"), and optimizers of TensorFlow 1 ask for the
    device that their variable has in this process; which worker's a node stands on is for kernels to say.
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
