"""The memory that a step needs on a worker: a forecast for the log, and the refusal of variables that do not fit."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from autodist.cluster.environments.local_facts import query_gpus
from autodist.cluster.environments.memory import MachineMemory
from autodist.errors import StrategyError
from autodist.graph.partial_count import PartialCount
from autodist.graph.step import ReplicatedStep, Step
from autodist.kernels.plan import LOCAL_COPY
from autodist.logs.formatting import readable_bytes
from autodist.proto import strategy_pb2
from autodist.resources import Worker
from autodist.strategies import bytes_of_layers_at_once, synced_variables
from autodist.synchronizers import layers_of

_DRIVER_LIMIT = 5.0
"""Seconds to wait for the GPU driver, which may not respond; the memory counts as unknown then."""


@dataclass(frozen=True)
class MemoryNeeds:
    """The memory that a worker needs for a training step, in bytes.

    Attributes:
        held: its variables with their slots.
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


def held_bytes(step: Step, workers: int) -> list[int]:
    """Returns the bytes of a step's variables that each worker holds, with the copies of local steps."""
    slices = step.slices if isinstance(step, ReplicatedStep) else {}
    held = [0] * workers
    for variable in step.variables:
        one = slices.get(variable.name)
        for worker in range(workers) if one is None or one.owner is None else one.group.workers:
            held[worker] += variable.byte_size * (1 if one is None else 1 + one.copies.count(LOCAL_COPY))
    return held


def held_in_one_memory(step: Step, workers: Sequence[Worker], index: int) -> int:
    """Returns the bytes of a step's variables in the memory of `available_memory`.

    Of a worker with GPUs, this is the first GPU; on a mesh, the others hold the other parts of variables.
    """
    held = held_bytes(step, len(workers))[index]
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
    """Returns the bytes of the smallest GPU; asked once, since each answer of the driver takes a process."""
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
