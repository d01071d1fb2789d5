"""Measures the computation of a training step on one replica of this worker, before its strategy is chosen.

The step runs in a graph and a session of its own, on copies of the variables. The script's variables, the run's
session and the states of random generators stay as they are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from autodist.graph.names import node_of
from autodist.graph.step import CapturedStep, Step
from autodist.proto import strategy_pb2
from autodist.resources.measurements import StepMeasurement
from autodist.runs.measuring.copied_step import CopiedStep, OneReplica, StepTimes, rewrite_for_one
from autodist.runs.measuring.estimates import estimated_updates
from autodist.runs.measuring.measurable import (
    count_examples,
    first_part,
    half_of,
    require_measurable,
    require_memory,
)
from autodist.runs.measuring.node_times import NodeTimes, medians_of, ready_times, update_times, updated_variables
from autodist.strategies import synced_variables

_LONGEST_STEP = 3.0
"""A step is cancelled after this multiple of the time limit; the first one is slower, since its kernels are new."""


def measure_step(
    step: CapturedStep,
    batch: Mapping[str, Any],
    variables: Mapping[str, Callable[[], Any]],
    replica: OneReplica,
    seconds: float = 5.0,
    compilation: strategy_pb2.Compilation | None = None,
) -> StepMeasurement:
    """Runs a training step some times on copies of its variables, and returns the time of its computation.

    An operation that only updates one variable counts for `updates`, from the gradient on. Operations that serve
    several variables, such as a global norm or a counter, count for none. If operations run concurrently, each is
    charged with an equal part of the time, so that all times together are the time of the step.

    Args:
        step: the captured step.
        batch: the values of its inputs in this worker's part of the first batch, by name.
        variables: functions that return the present values of its variables, by name. Each is called once; values of
            about 16 MB are copied at a time.
        replica: the replica that runs it.
        seconds: time limit, without the preparation of the graph and the first step, after which at least two run.
        compilation: what XLA compiles of the step; None: what the script requests.

    Raises:
        CannotMeasure: the step has effects outside of its variables, needs too much memory or takes too long, or the
            batch does not fit it.
    """
    began = time.perf_counter()
    require_measurable(step)
    whole = first_part(step, batch, replica.replicas)
    is_compiled = step.jit_compile if compilation is None else bool(compilation.computation or compilation.updates)
    half = None if is_compiled else half_of(step, whole)
    require_memory(step, whole, replica.memory)
    rewritten = rewrite_for_one(step, replica.device, compilation)
    indices = _indices(rewritten)
    fetched = [t for tensors in indices.values() for t in tensors]
    runs = CopiedStep(rewritten, fetched, replica, _LONGEST_STEP * seconds)
    with runs.on_copies(variables):
        times = StepTimes.of(runs, whole, half, seconds)
    nodes, updated = rewritten.graph_index.nodes, {} if is_compiled else updated_variables(step, rewritten)
    traces = [NodeTimes.of(ran.stats, nodes).scaled_to(times.whole) for ran in times.traced]
    estimates = estimated_updates(step)
    updates = medians_of([update_times(step, updated, trace, estimates) for trace in traces])
    # In each trace, updates are parts of the step; medians of several traces may add up to more.
    most = min(1.0, times.whole / max(sum(updates.values()), 1e-9))
    updates = {name: most * spent for name, spent in updates.items()}
    counts = count_examples(step, whole), 0 if half is None else count_examples(step, half)
    return StepMeasurement(
        seconds=times.whole,
        fixed=times.fixed(*counts, sum(updates.values())),
        updates=updates,
        ready=medians_of([ready_times(rewritten, trace.ends, times.whole) for trace in traces]),
        rows=_distinct_rows(indices, times.traced[0].values),
        took=time.perf_counter() - began,
    )


def _indices(step: Step) -> dict[str, list[str]]:
    """Returns the indices of the sparse gradients of each variable whose gradients are all sparse."""
    sparse = {variable.name for variable in synced_variables(step) if variable.is_sparse}
    found: dict[str, list[str]] = {}
    for gradient in step.gradients:
        if gradient.variable in sparse and node_of(gradient.tensors[0]) in step.graph_index.nodes:
            found.setdefault(gradient.variable, []).append(gradient.tensors[0])
    return found


def _distinct_rows(indices: Mapping[str, Sequence[str]], values: Sequence[np.ndarray]) -> dict[str, int]:
    """Returns the number of different rows of each variable; `values` are those of all indices in order."""
    remaining = iter(values)
    return {
        name: int(np.unique(np.concatenate([next(remaining).ravel() for _ in tensors])).size)
        for name, tensors in indices.items()
    }
