"""Assigns the nodes' devices to workers, with one replica for each device. Pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from autodist.resources._node import Node

T = TypeVar("T")


@dataclass(frozen=True)
class Worker:
    """A process that runs the user's script and holds one TensorFlow server.

    Attributes:
        index: 0 is the chief; also the task index in TensorFlow's device names.
        name: short and unique, shown before each line of its output: the node's address, followed by the position
            within the node if the node has several workers ("10.0.0.1:1").
        node: the machine that it runs on.
        port: the port of its server; None: any free port.
        devices: one for each of its replicas; empty for a worker that only owns variables. A GPU keeps its number on
            the machine ("gpu:3"). CPU devices are logical devices of the worker's own process, counted from 0
            ("cpu:0", "cpu:1").
        cores: number of cores reserved for it; None: the workers of its machine share the cores.
    """

    index: int
    name: str
    node: Node
    port: int | None
    devices: tuple[str, ...]
    cores: int | None = None

    @property
    def is_chief(self) -> bool:
        return self.index == 0

    @property
    def has_replicas(self) -> bool:
        """True if it computes; a worker without replicas only owns variables."""
        return bool(self.devices)


@dataclass(frozen=True)
class Replica:
    """One copy of the compute part of the step.

    Attributes:
        index: its index among all replicas.
        worker: the worker that runs it.
        device: the device of the worker ("cpu:1", "gpu:0").
    """

    index: int
    worker: Worker
    device: str


@dataclass(frozen=True)
class Allotment:
    """The resources of a process that a scheduler has started.

    Attributes:
        devices: the devices of its replicas, as its own TensorFlow names them.
        cores: the number of cores.
        port: the port of its server; None: any free port.
    """

    devices: tuple[str, ...]
    cores: int
    port: int | None = None


def split_evenly(items: Sequence[T], parts: int) -> tuple[tuple[T, ...], ...]:
    """Splits `items` into `parts` consecutive runs of equal length.

    >>> split_evenly("abcd", 2)
    (('a', 'b'), ('c', 'd'))

    Raises:
        ValueError: the number of items is not divisible by `parts`.
    """
    if parts < 1 or len(items) % parts:
        raise ValueError(f"{len(items)} items cannot be split evenly into {parts} parts")
    size = len(items) // parts
    return tuple(tuple(items[part * size : (part + 1) * size]) for part in range(parts))


def assign_workers(nodes: Iterable[Node]) -> tuple[Worker, ...]:
    """Returns all workers: those of the chief's node first, then those of the other nodes in their order."""
    ordered = sorted(nodes, key=lambda node: not node.chief)
    placed = [
        (node, position, devices) for node in ordered for position, devices in enumerate(_devices_of_workers(node))
    ]
    return tuple(_worker(index, node, position, devices) for index, (node, position, devices) in enumerate(placed))


def allot(workers: Sequence[Worker], allotments: Sequence[Allotment]) -> tuple[Worker, ...]:
    """Returns the workers with the devices, cores and ports of their allotments."""
    return tuple(
        replace(worker, devices=allotment.devices, cores=allotment.cores, port=allotment.port)
        for worker, allotment in zip(workers, allotments, strict=True)
    )


def list_replicas(workers: Iterable[Worker]) -> Iterator[Replica]:
    """Yields all replicas, worker by worker."""
    placed = ((worker, device) for worker in workers for device in worker.devices)
    for index, (worker, device) in enumerate(placed):
        yield Replica(index, worker, device)


def name_places(workers: Iterable[Worker]) -> Iterator[str]:
    """Yields a name for each device of each worker, as Keras names devices: numbered by kind over all workers."""
    counts: Counter[str] = Counter()
    for kind in (device.partition(":")[0] for worker in workers for device in worker.devices):
        yield f"{kind}:{counts[kind]}"
        counts[kind] += 1


def _worker(index: int, node: Node, position: int, devices: tuple[str, ...]) -> Worker:
    port = None if node.port is None else node.port + position
    return Worker(index, _name(node, position), node, port, devices)


def _name(node: Node, position: int) -> str:
    if node.workers == 1:
        return node.address
    address = f"[{node.address}]" if ":" in node.address else node.address
    return f"{address}:{position}"


def _devices_of_workers(node: Node) -> list[tuple[str, ...]]:
    """Returns the devices of each worker of a node, under the worker's own names."""
    if node.gpus:
        return [tuple(f"gpu:{number}" for number in part) for part in split_evenly(node.gpus, node.workers)]
    return [
        tuple(f"cpu:{position}" for position, _ in enumerate(part)) for part in split_evenly(node.cpus, node.workers)
    ]
