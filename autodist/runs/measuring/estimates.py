"""Estimates of the computation of a step from its FLOPs and bytes, at assumed rates."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

import tensorflow as tf

from autodist.graph.flops import flops_of_nodes, with_inferred_shapes
from autodist.graph.gradient_rows import gradient_rows
from autodist.graph.layer_flops import OPEN_LENGTH
from autodist.graph.parts import Variable
from autodist.graph.step import CapturedStep, Step
from autodist.kernels.place.slots import find_slots
from autodist.resources.measurements import StepMeasurement
from autodist.runs.measuring.node_times import ready_times
from autodist.strategies import SyncedVariable, synced_variables

_FLOPS_PER_CORE = 3e10
"""Assumed FLOPs per second of a core, in float32: about half of what large matrix products reach with AVX2."""

_UPDATED_BYTES = 5e9
"""Assumed bytes per second that an update reads and writes: about half of a core's memory bandwidth."""


def estimate_step(
    step: CapturedStep, shapes: Mapping[str, Sequence[int | None]] | None = None, cores: int = 1
) -> StepMeasurement:
    """Estimates the computation of a step from its FLOPs and bytes, at assumed rates.

    Nodes without a formula or a shape, such as the functions of loops, count as 0. Operations on small or many
    tensors reach a small part of the assumed rates. The estimate is therefore low for recurrent networks, for
    depthwise convolutions and for embeddings.

    Args:
        step: the captured step.
        shapes: shapes of its inputs in the part of one replica; unknown lengths count as 32.
        cores: number of cores of a replica.
    """
    began = time.perf_counter()
    known = {name: _closed(step, name, (shapes or {}).get(name)) for name in step.inputs}
    closed = {name: shape for name, shape in known.items() if shape is not None}
    try:
        flops = flops_of_nodes(with_inferred_shapes(step, sorted(step.named), closed))
        touched = gradient_rows(step, closed)
    except ValueError:  # TensorFlow's: the step does not support such lengths
        flops, touched = {}, {}
    synced = synced_variables(step)
    rows = {v.name: min(touched[v.name], v.shape[0]) for v in synced if v.is_sparse and v.name in touched}
    updates = estimated_updates(step, rows)
    durations = {name: (count or 0) / (_FLOPS_PER_CORE * cores) for name, count in flops.items()}
    computing = sum(durations.values())
    ready = ready_times(step, _ends_of_paths(step, durations))
    # A path has one of the two products of a layer's backward pass, which run one after the other.
    scale = computing / longest if (longest := max(ready.values(), default=0.0)) else 0.0
    return StepMeasurement(
        seconds=computing + sum(updates.values()),
        fixed=sum(updates.values()),
        updates=updates,
        ready={name: end * scale for name, end in ready.items()},
        rows=rows,
        took=time.perf_counter() - began,
    )


def _closed(step: CapturedStep, name: str, shape: Sequence[int | None] | None) -> list[int] | None:
    """Returns the shape of an input with 32 in place of unknown lengths; None if not even its rank is known."""
    found = step.spec_of(name).shape if shape is None else tf.TensorShape(shape)
    if found.rank is None:
        return None
    return [OPEN_LENGTH if length is None else length for length in found.as_list()]


def estimated_updates(step: CapturedStep, rows: Mapping[str, int] | None = None) -> dict[str, float]:
    """Returns the seconds of the update of each variable at the assumed rate; `rows` are those that a step touches."""
    slots, touched = find_slots(step), rows or {}
    return {
        variable.name: _updated_bytes(variable, slots[variable.name], touched.get(variable.name)) / _UPDATED_BYTES
        for variable in synced_variables(step)
    }


def _updated_bytes(variable: SyncedVariable, slots: Iterable[Variable], rows: int | None) -> float:
    """Returns the bytes that an update reads and writes: value, gradient and slots, or the touched rows of each."""
    count = 2 * variable.byte_size + sum(slot.byte_size for slot in slots)
    return count if rows is None else count * rows / max(1, variable.shape[0])


def _ends_of_paths(step: Step, durations: Mapping[str, float]) -> dict[str, float]:
    """Returns the end of each node if every node starts as soon as its inputs exist."""
    ends: dict[str, float] = {}
    for name in step.graph_index.order:
        start = max((ends.get(source, 0.0) for source in step.graph_index.data[name]), default=0.0)
        ends[name] = start + durations.get(name, 0.0)
    return ends
