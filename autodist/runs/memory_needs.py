"""The memory that a step needs on a worker: a forecast for the log, and the refusal of variables that do not fit."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autodist.cluster.hardware import MachineMemory, query_gpus
from autodist.errors import StrategyError
from autodist.graph.partial_count import PartialCount
from autodist.graph.step import ReplicatedStep, Step
from autodist.logs.formatting import readable_bytes
from autodist.placement.group import worker_count
from autodist.placement.holder import Slice
from autodist.placement.partitioning import shard_name
from autodist.proto import strategy_pb2
from autodist.resources import Worker
from autodist.strategies import bytes_of_layers_at_once, synced_variables
from autodist.synchronizers import AllReduce, all_synchronizers, layers_of

_DRIVER_LIMIT = 5.0
"""Seconds to wait for the GPU driver, which may not respond; the memory counts as unknown then."""


@dataclass(frozen=True)
class MemoryNeeds:
    """The memory that a worker needs for a training step, in bytes.

    Attributes:
        held: its variables with their slots and copies.
        gradients: the gradients of one replica, which exist at the end of the backward pass.
        activations: what its replicas keep for the backward pass.
        layers: the gathered layers, with their gradients, that exist at a time.
    """

    held: int
    gradients: int
    activations: PartialCount
    layers: int = 0

    @staticmethod
    def of(step: Step, held: int, activations: PartialCount, strategy: strategy_pb2.Strategy) -> MemoryNeeds:
        """Returns the needs for a step with the variables of one place."""
        layers = layers_of(strategy)
        whole = [v for v in synced_variables(step) if not v.is_sparse and v.name not in layers]
        gradients = sum(variable.byte_size for variable in whole)
        return MemoryNeeds(held, gradients, activations, bytes_of_layers_at_once(strategy, step))

    def described(self, available: int) -> str:
        """Describes the needs; `available` is the memory of the worker, or 0 if it is not known."""
        total = PartialCount(self.held + self.gradients + self.layers) + self.activations
        least = "at least " if total.is_least else ""
        of = f" of {readable_bytes(available)}" if available else ""
        activations = "not known" if self.activations.known is None else readable_bytes(self.activations.count)
        layers = f"{readable_bytes(self.layers)} for gathered layers, " if self.layers else ""
        return (
            f"a step needs {least}{readable_bytes(total.count)}{of}: {readable_bytes(self.held)} for variables with "
            f"their slots, {layers}{readable_bytes(self.gradients)} for gradients, {activations} for activations."
        )


def held_bytes(step: Step, strategy: strategy_pb2.Strategy, workers: int) -> list[int]:
    """Returns the bytes of a rewritten step's variables that each worker holds, with copies and outer momentum."""
    slices = step.slices if isinstance(step, ReplicatedStep) else {}
    return bytes_of_slices(
        [(variable.byte_size, slices.get(variable.name)) for variable in step.variables],
        outer_momentum_bytes(step, strategy),
        workers,
    )


def bytes_of_slices(slices: Iterable[tuple[int, Slice | None]], everywhere: int, workers: int) -> list[int]:
    """Returns the bytes that each worker holds.

    Args:
        slices: the bytes of each slice of a variable, and the slice; None: every worker holds it.
        everywhere: further bytes that each worker holds.
        workers: number of workers.
    """
    held = [0] * workers
    for size, one in slices:
        if one is None:
            everywhere += size
            continue
        if one.group.is_all:
            everywhere += size
        else:
            for worker in one.group.workers:
                held[worker] += size
        for copy in one.copies:
            everywhere += size
            if one.owner is not None and not copy.is_at_owner:
                held[one.owner] -= size
    return [own + everywhere for own in held]


def outer_momentum_bytes(step: Step, strategy: strategy_pb2.Strategy) -> int:
    """Returns the bytes of the momentum of outer steps, which each worker holds for its variables with local steps."""
    if worker_count(strategy.graph_config) == 1:
        return 0  # nothing is averaged
    ways = {name: one for name, one in all_synchronizers(strategy) if isinstance(one, AllReduce)}
    found = 0
    for variable in step.variables:
        way = ways.get(variable.name) or ways.get(shard_name(variable.name, 0))
        if way is not None and way.local is not None and way.local.outer_momentum:
            found += variable.byte_size
    return found


def held_in_one_memory(step: Step, strategy: strategy_pb2.Strategy, workers: Sequence[Worker], index: int) -> int:
    """Returns the bytes of a step's variables in the memory of `available_memory`.

    Of a worker with GPUs, this is the first GPU; on a mesh, the others hold the other parts of variables.
    """
    held = held_bytes(step, strategy, len(workers))[index]
    parts = sum(variable.byte_size for variable in step.variables if step.part_of(variable.handle)[0])
    return held - parts if has_gpus(workers[index]) else held


def has_gpus(worker: Worker) -> bool:
    """Returns True if a worker computes on GPUs."""
    return any(device.startswith("gpu:") for device in worker.devices)


def available_memory(workers: Sequence[Worker], index: int) -> int:
    """Returns the bytes of memory of a worker's device, or of its share of the machine; 0 if it is not known."""
    own = workers[index]
    if has_gpus(own):
        return _gpu_memory()
    memory = MachineMemory.now()
    return (memory.total + memory.swap) // sum(worker.node.address == own.node.address for worker in workers)


@functools.cache
def _gpu_memory() -> int:
    """Returns the bytes of the smallest GPU; queried once, since each answer of the driver takes a process."""
    totals = [int(line) for line in query_gpus("memory.total", _DRIVER_LIMIT) if line.strip().isdecimal()]
    return min(totals, default=0) * 1024**2


def require_memory(held: int, workers: Sequence[Worker], index: int) -> None:
    """Checks that the variables of a worker fit into its memory.

    Args:
        held: their bytes, with their slots.
        workers: the workers of the run.
        index: the worker, which runs on this machine.

    Raises:
        StrategyError: they do not fit.
    """
    available = available_memory(workers, index)
    if 0 < available < held:
        raise StrategyError(
            f"{workers[index].name} needs {readable_bytes(held)} for the variables of the step with their slots, and "
            f"has {readable_bytes(available)} of memory. Use more workers and a strategy that shards the variables, "
            "such as `builder: FSDP` or `builder: Mesh`, or devices with more memory."
        )
