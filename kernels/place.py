"""Place: what no earlier kernel placed stands on this worker."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import tensorflow as tf

from autodist.graph.item import GraphItem
from autodist.kernels.base import Context, Kernel


@dataclass(frozen=True)
class Place(Kernel):
    """Gives every node a device of a worker: a replica's on its own device, all else on the worker's first device.

    Colocation classes, which say the same thing less plainly, are taken away.
    """

    name: ClassVar[str] = "place"

    def apply(self, item: GraphItem, context: Context) -> GraphItem:
        devices = [context.replicas[k].device for k in context.local_replicas]
        placed = tf.compat.v1.GraphDef()
        placed.CopyFrom(item.graph_def)
        known: dict[tuple[str, str], str] = {}
        for node in placed.node:
            key = (node.device, _replica_device(node.name, devices))
            if key not in known:
                known[key] = _device(*key, context)
            node.device = known[key]
            # A class that names a node on another worker would move this one there, whatever its own device says.
            node.attr.pop("_class", None)
        return replace(item, graph_def=placed)


def _device(asked: str, replica_device: str, context: Context) -> str:
    spec = tf.DeviceSpec.from_string(asked)
    if spec.job is not None:
        return asked
    kind, _, index = replica_device.partition(":")
    # A worker's CPU replicas run side by side on one TensorFlow device: they share its memory and its threads.
    on_cpu = kind == "cpu" or spec.device_type == "CPU"
    return f"{context.task(context.worker)}/device:{'CPU:0' if on_cpu else f'GPU:{index}'}"


def _replica_device(name: str, devices: list[str]) -> str:
    first, _, _ = name.partition("/")
    prefix, _, position = first.partition("_")
    if prefix == "replica" and position.isdecimal() and int(position) < len(devices):
        return devices[int(position)]
    return devices[0]
