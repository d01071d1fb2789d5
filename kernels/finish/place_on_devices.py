"""PlaceOnDevices: assigns a device of this worker to every node that earlier kernels have placed on no worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import tensorflow as tf

from autodist.graph.devices import device_of
from autodist.graph.editor import NodeDef
from autodist.graph.step import Phase, Step, StepWithOwners
from autodist.kernels.base import Context, Kernel


@dataclass(frozen=True)
class PlaceOnDevices(Kernel[Step, Step]):
    """Assigns a device to every node: a replica's nodes to its device, all others to the worker's first device.

    On a mesh, nodes on a part of a tensor get the device of its place.

    Nodes that use a variable's handle are placed with the variable. Colocation classes become redundant and are
    removed.
    """

    name: ClassVar[str] = "place-on-devices"
    after: ClassVar[Mapping[str, str]] = {
        "read-remote-variables": "it places nodes on other workers",
    }

    def apply(self, step: Phase, context: Context) -> Phase:
        devices = _devices(context)
        placed = tf.compat.v1.GraphDef()
        placed.CopyFrom(step.graph_def)
        known: dict[tuple[str, str], str] = {}
        nodes = dict(zip(step.graph_index.nodes, placed.node, strict=True))
        for name, node in nodes.items():
            key = (node.device, _own_device(step, name, devices))
            if key not in known:
                known[key] = _device(*key, context)
            node.device = known[key]
            # A class that names a node on another worker would override the device.
            node.attr.pop("_class", None)
        _stay_with_variables(step, nodes, devices, context)
        return replace(step, graph_def=placed)


def _device(captured: str, replica_device: str, context: Context) -> str:
    spec = tf.DeviceSpec.from_string(captured)
    if spec.job is not None:
        return captured
    if spec.device_type == "CPU":
        return context.cpu(context.worker)
    return device_of(context.worker, context.workers, replica_device)


def _stay_with_variables(
    step: Step, nodes: Mapping[str, NodeDef], own_devices: list[list[str]], context: Context
) -> None:
    this_task = context.task(context.worker)
    devices = {}
    for handle in step.graph_index.of_op("VarHandleOp"):
        node = nodes[handle.name]
        if node.device.startswith(this_task):
            device = _device_of_part(step, handle.name, own_devices, context)
            node.device = context.home(context.worker, tf.as_dtype(node.attr["dtype"].type), device)
        devices[handle.name] = node.device
    for name in {consumer for handle in devices for consumer in step.graph_index.consumers[handle]}:
        handle_input = next((i for i in nodes[name].input if i in devices), None)
        if handle_input is not None:
            nodes[name].device = devices[handle_input]


def _device_of_part(step: Step, handle: str, devices: list[list[str]], context: Context) -> str | None:
    """Returns the device that holds a part of a variable on a mesh; None: it is the worker's first one."""
    coordinate, _ = step.part_of(handle)
    if coordinate:
        return devices[coordinate][0]
    variable = step.by_handle.get(handle)
    if isinstance(step, StepWithOwners) and variable is not None and variable.name in step.slices:
        return step.slices[variable.name].device(context.worker)
    return None


def _devices(context: Context) -> list[list[str]]:
    """Returns the device of each replica of this worker, for each of its coordinates on a mesh."""
    if context.mesh is None:
        return [[context.replicas[k].device for k in context.local_replicas] or [context.first_device(context.worker)]]
    places, replicas = context.strategy.mesh.places, range(len(context.local_replicas) or 1)
    return [[places[context.place_of(k, j)].device for k in replicas] for j in range(len(context.coordinates))]


def _own_device(step: Step, name: str, devices: list[list[str]]) -> str:
    replica, placed = step.replica_of(name)
    own = devices[step.part_of(placed)[0]]
    return own[replica if replica < len(own) else 0]
