"""The computation of a step on one worker: measured, with estimates in place of what was not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from autodist.resources import ResourceSpec
from autodist.strategies.variables import SyncedVariable

UPDATE_RATE = 2e9
"""Assumed bytes per second that an update reads and writes; a measured step replaces it."""

_ROWS = 1000
"""Assumed rows of a table that a worker's batch touches, if no batch is known."""


@dataclass(frozen=True)
class StepFacts:
    """The computation of a step on one worker.

    Attributes:
        seconds: of the forward and backward pass.
        updates: seconds to update a whole variable with the rows of one worker's batch, by the variable's name.
        ready: moment at which the gradient of a variable is ready, as a fraction of `seconds`, by its name.
        rows: distinct rows of each table that a worker's batch touches.
        slots: bytes of the slots of each variable.
        slowness: factor by which each worker takes longer than the chief.
        is_measured: False if `seconds` and `updates` are estimates.
    """

    seconds: float
    updates: Mapping[str, float]
    ready: Mapping[str, float]
    rows: Mapping[str, int]
    slots: Mapping[str, int]
    slowness: np.ndarray
    is_measured: bool

    @classmethod
    def of(cls, spec: ResourceSpec, variables: Iterable[SyncedVariable]) -> StepFacts:
        """Returns the facts that were measured, with estimates in place of missing ones."""
        measured, slots = spec.measurements.step, spec.measurements.slots
        own = {} if measured is None else measured.updates
        rows = {} if measured is None else measured.rows
        updates = {}
        for variable in variables:
            size = variable.byte_size
            touched = touched_rows(variable, rows) * variable.row_bytes if variable.is_sparse else size
            share = touched / max(size, 1)
            estimate = (2 * touched + 2 * share * slots.get(variable.name, 0)) / UPDATE_RATE
            updates[variable.name] = own.get(variable.name, estimate)
        total = 0.0 if measured is None else measured.seconds
        seconds = max(total - sum(own.values()), 0.0)
        ready = {} if measured is None else _fractions(measured.ready, own, seconds)
        slowness = np.array(spec.measurements.slowness or (1.0,) * len(spec.workers))
        return cls(
            seconds, updates, ready, rows, slots, slowness, measured is not None and not spec.measurements.why_not
        )


def _fractions(ready: Mapping[str, float], updates: Mapping[str, float], seconds: float) -> dict[str, float]:
    """Returns the moments at which gradients are ready, without the updates before them, as fractions of `seconds`.

    An update may run as soon as its gradient is ready, while others are still computed.
    """
    fractions, updated = {}, 0.0
    for name, at in sorted(ready.items(), key=lambda one: one[1]):
        fractions[name] = min(max(at - updated, 0.0) / max(seconds, 1e-9), 1.0)
        updated += updates.get(name, 0.0)
    if fractions and max(ready.values()) <= seconds:  # all updates come last, as behind a global norm
        return {name: min(at / max(seconds, 1e-9), 1.0) for name, at in ready.items()}
    return fractions


def touched_rows(variable: SyncedVariable, rows: Mapping[str, int]) -> int:
    """Returns the number of rows of a table that one worker's batch touches."""
    return min(rows.get(variable.name, _ROWS), variable.shape[0] if variable.shape else 1)
