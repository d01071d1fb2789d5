"""Place: what no earlier kernel placed stands on this worker."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import tensorflow as tf

from autodist.graph.editor import GraphEditor
from autodist.graph.item import GraphItem
from autodist.kernels.base import Context, Kernel


@dataclass(frozen=True)
class Place(Kernel):
    """Gives every node a device of a worker: a replica's on its own device, all else on the worker's first device.

    Colocation classes, which say the same thing less plainly, are taken away.
    """

    name: ClassVar[str] = "place"

    def apply(self, item: GraphItem, context: Context) -> GraphItem:
        editor = GraphEditor(item.graph_def)
        devices = [context.replicas[k].device for k in context.local_replicas]
        for node in editor:
            node.device = _device(node, context, devices)
            # A class that names a node on another worker would move this one there, whatever its own device says.
            node.attr.pop("_class", None)
        return replace(item, graph_def=editor.to_graph_def())


def _device(node: tf.compat.v1.NodeDef, context: Context, devices: list[str]) -> str:
    asked = tf.DeviceSpec.from_string(node.device)
    if asked.job is not None:
        return node.device
    kind, _, index = _replica_device(node.name, devices).partition(":")
    # A worker's CPU replicas run side by side on one TensorFlow device: they share its memory and its threads.
    on_cpu = kind == "cpu" or asked.device_type == "CPU"
    return f"{context.task(context.worker)}/device:{'CPU:0' if on_cpu else f'GPU:{index}'}"


def _replica_device(name: str, devices: list[str]) -> str:
    first, _, _ = name.partition("/")
    prefix, _, position = first.partition("_")
    if prefix == "replica" and position.isdecimal() and int(position) < len(devices):
        return devices[int(position)]
    return devices[0]
