"""The measurements from which `Auto` chooses; made when a training step needs them."""

from __future__ import annotations

import json
import logging
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from autodist.graph.activations import activation_bytes
from autodist.graph.blocks import find_blocks
from autodist.graph.flops import flops_of_nodes, with_inferred_shapes
from autodist.graph.partial_count import PartialCount, saved_by_recomputation
from autodist.graph.recomputation_costs import recomputation_costs
from autodist.graph.step import CapturedStep
from autodist.kernels.place.slots import find_slots
from autodist.options.fields import OptionError
from autodist.proto.strategy_pb2 import Compilation
from autodist.resources import Measurements, NetworkMeasurement, Recomputation, ResourceSpec, StepMeasurement
from autodist.runs.measuring.attempt import Values, attempt, begin_together
from autodist.runs.measuring.copied_step import OneReplica
from autodist.runs.measuring.estimates import estimate_step
from autodist.runs.measuring.measurable import CannotMeasure
from autodist.runs.measuring.measured_step import measure_step
from autodist.runs.measuring.measurement_file import ClusterIdentity, MeasurementFile
from autodist.runs.measuring.network_probe import measure_network
from autodist.runs.memory_needs import available_memory, has_gpus
from autodist.runtime.threads import cores_of
from autodist.strategies import find_auto
from autodist.strategies.network_model import machines_of

if TYPE_CHECKING:
    from autodist.runs.run import Run

log = logging.getLogger("autodist")

LIMIT = 3.0
"""Seconds for the steps that are timed."""

_FORWARD = 1 / 3
"""Assumed part of the forward pass in the FLOPs of a step: the backward pass has two products for each of its own."""


class AutoMeasurements:
    """Measures for one run; see `Measurements`. All workers make the same calls.

    Args:
        run: the run.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        auto = find_auto(run.builder)
        self._recompute = auto.recompute if auto is not None else False
        self._network = _known_network(run.spec) if run.index == 0 else None

    def of(
        self,
        step: CapturedStep,
        names: Mapping[str, str],
        batch: Mapping[str, Any],
        shapes: Mapping[str, Sequence[int]],
        compilation: Compilation | None = None,
    ) -> Measurements:
        """Measures a training step on each worker, and the network if that was not measured yet; a collective call.

        Args:
            step: the captured step.
            names: the session's name of each variable.
            batch: the values of its inputs in this worker's part of the first batch; empty: not known.
            shapes: their shapes, if known.
            compilation: what XLA compiles of the step; None: what the script requests.

        Returns:
            The measurements, on the chief; on other workers, those of the worker itself.

        Raises:
            ClusterError: two workers cannot send to each other.
        """
        begin_together(self._run)
        coordination = self._run.coordination
        own = self._of_step(step, names, batch, shapes, compilation)
        cores = cores_of(self._run.spec.workers, self._run.index)
        seconds = 0.0 if own.step is None or own.why_not else own.step.seconds
        memory = available_memory(self._run.spec.workers, self._run.index)
        coordination.reach_collective()  # workers that refuse the step are at the call before
        parts = [json.loads(part) for part in coordination.gather(json.dumps([seconds, memory, cores]).encode())]
        if self._run.index > 0:
            return own
        self._network = self._network or self._measured_network()
        of_all, memories, all_cores = zip(*parts, strict=True)
        shares = cores_while_measured(self._run.spec, of_all, all_cores)
        if own.step is not None and of_all[0]:
            own = replace(own, step=own.step.with_own_cores(shares[0]))
        slowness = self._slowness([one * min(share, 1.0) for one, share in zip(of_all, shares, strict=True)])
        return replace(own, network=self._network, slowness=slowness, memory=memories, cores=all_cores)

    def _slowness(self, seconds: Sequence[float]) -> tuple[float, ...]:
        """Returns the seconds of each worker as a multiple of the chief's; () if one could not measure.

        Workers without replicas compute nothing but updates, and count as equally fast.
        """
        computing = [worker.has_replicas for worker in self._run.spec.workers]
        if not all(one for one, computes in zip(seconds, computing, strict=True) if computes) or not computing[0]:
            return ()
        return tuple(one / seconds[0] if computes else 1.0 for one, computes in zip(seconds, computing, strict=True))

    def _of_step(
        self,
        step: CapturedStep,
        names: Mapping[str, str],
        batch: Mapping[str, Any],
        shapes: Mapping[str, Sequence[int]],
        compilation: Compilation | None,
    ) -> Measurements:
        def measure(values: Values, replica: OneReplica) -> StepMeasurement:
            return measure_step(step, batch, values, replica, LIMIT, compilation)

        try:
            measured = attempt(self._run, "a step", step, names, batch, measure)
        except CannotMeasure as error:
            return estimated_measurements(step, self._run.spec, shapes, str(error), self._recompute)
        return replace(needs_of(step, self._run.spec, shapes, self._recompute), step=measured)

    def _measured_network(self) -> NetworkMeasurement:
        run, machines = self._run, machines_of(self._run.spec)
        names = [worker.name for worker in run.spec.workers]
        with run.startup.showing("measuring the links between the workers"):
            measured = run.guard(measure_network, run.target, machines, run.spec.start_timeout, names)
        MeasurementFile.beside(run.spec.file).write(ClusterIdentity.of(run.spec), measured)
        return measured


def cores_while_measured(spec: ResourceSpec, seconds: Sequence[float], cores: Sequence[float]) -> tuple[float, ...]:
    """Returns the cores that each worker had while the workers of its machine measured the step at the same time.

    Args:
        spec: the machines.
        seconds: the measured seconds of each worker; 0: it did not measure.
        cores: the number of cores of each worker; below 1 if its machine has more workers than cores.
    """
    machines, all_cores, measuring = machines_of(spec), defaultdict[int, float](float), Counter[int]()
    for machine, worker, took, own in zip(machines, spec.workers, seconds, cores, strict=True):
        all_cores[machine] += own
        measuring[machine] += bool(took) and not has_gpus(worker)
    return tuple(
        inf if has_gpus(worker) else all_cores[machine] / max(measuring[machine], 1)
        for machine, worker in zip(machines, spec.workers, strict=True)
    )


def needs_of(
    step: CapturedStep,
    spec: ResourceSpec,
    shapes: Mapping[str, Sequence[int]],
    recompute: bool | Sequence[str] = False,
) -> Measurements:
    """Returns the memory that a step needs besides its variables; nothing is run.

    Args:
        step: the captured step.
        spec: the machines.
        shapes: shapes of its inputs in the chief's part of the first batch, if known.
        recompute: the builder's option; the effect of True is returned if it is not set.
    """
    slots = {name: sum(slot.byte_size for slot in own) for name, own in find_slots(step).items()}
    if not shapes:
        return Measurements(slots=slots)
    # The memory of a worker is that of one GPU, or of its share of the machine.
    in_memory = _of_replica(step, spec, shapes) if has_gpus(spec.workers[0]) else shapes
    graph = with_inferred_shapes(step, sorted(step.named), in_memory)
    return Measurements(
        slots=slots,
        activations=activation_bytes(step, graph).count,
        recomputation=_recomputation(step, graph, recompute or True),
    )


def _recomputation(step: CapturedStep, graph: tf.Graph, choice: bool | Sequence[str]) -> Recomputation | None:
    """Returns the effect of computing the activations of blocks again; None if no blocks are found."""
    try:
        blocks = find_blocks(step, choice)
    except OptionError:  # raised again if the option is set
        return None
    flops = flops_of_nodes(graph)
    costs, total = recomputation_costs(step, blocks, graph, flops), PartialCount.of(flops.values()).count
    again = sum(one.flops.count for one in costs)
    return Recomputation(
        saved=saved_by_recomputation([one.bytes for one in costs]).count,
        again=again / total if total else _FORWARD,
    )


def estimated_measurements(
    step: CapturedStep,
    spec: ResourceSpec,
    shapes: Mapping[str, Sequence[int]],
    why_not: str,
    recompute: bool | Sequence[str] = False,
) -> Measurements:
    """Returns the computation of a step by its FLOPs, and the memory that it needs; nothing is run.

    Args:
        step: the captured step.
        spec: the machines.
        shapes: shapes of its inputs in the chief's part of the first batch, if known.
        why_not: the reason why it is not measured.
        recompute: the builder's option.
    """
    cores = OneReplica.of(spec.workers, 0).config.intra_op_parallelism_threads
    estimated = estimate_step(step, _of_replica(step, spec, shapes), max(cores, 1))
    return replace(needs_of(step, spec, shapes, recompute), step=estimated, why_not=why_not)


def _of_replica(step: CapturedStep, spec: ResourceSpec, shapes: Mapping[str, Sequence[int]]) -> dict[str, list[int]]:
    """Returns the shapes of a step's inputs in the part of one replica of the chief."""
    replicas = max(len(spec.workers[0].devices), 1)
    return {
        name: [-(-length // replicas) if axis == step.inputs.get(name) else length for axis, length in enumerate(shape)]
        for name, shape in shapes.items()
    }


def known_measurements(
    step: CapturedStep,
    spec: ResourceSpec,
    shapes: Mapping[str, Sequence[int]],
    recompute: bool | Sequence[str] = False,
) -> Measurements:
    """Returns the estimates for a step, and the network as an earlier run has measured it."""
    network = None if len(spec.workers) == 1 else _known_network(spec)
    memory = (available_memory(spec.workers, 0),) * len(spec.workers)
    estimated = estimated_measurements(step, spec, shapes, "no step was run", recompute)
    return replace(estimated, network=network, memory=memory)


def _known_network(spec: ResourceSpec) -> NetworkMeasurement | None:
    """Returns the measurement in the file beside the YAML; None: there is none that can be used, as the log says."""
    found = MeasurementFile.beside(spec.file).read(ClusterIdentity.of(spec))
    if found.why_not:
        log.info("%s", found.why_not)
    return found.network
