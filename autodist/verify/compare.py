"""How far the recorded steps of two runs lie apart."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autodist.verify.recording import OUTPUTS

Values = Mapping[str, NDArray[Any]]
"""By kind and name, what one step has left."""

FLOAT64_LIMIT = 1e-9
"""The promise in float64."""

FLOORS = 10
"""The promise in other precisions, in rounding floors."""

LAST_BIT = float(np.finfo(np.float32).eps)
"""What rounding leaves at least, where few steps happen to show none."""


@dataclass(frozen=True)
class Difference:
    """How far one value lies apart in the two runs.

    Attributes:
        name: kind and name of the value.
        largest: relative difference of any step.
        at: the step that has it, from 1.
    """

    name: str
    largest: float
    at: int


@dataclass(frozen=True)
class Compared:
    """Two runs, compared.

    Attributes:
        steps: that both have.
        differences: of each value that both have in one shape, in their order.
        left_out: names of values that the runs have in different shapes, as rows of a part of the batch.
        first: of those that are past the limit, the first in the first step that has one; None: there is none.
    """

    steps: int
    differences: tuple[Difference, ...]
    left_out: tuple[str, ...]
    first: Difference | None


def compare(reference: Path, other: Path, limit: float, limits: Mapping[str, float] = MappingProxyType({})) -> Compared:
    """Compares what two runs have recorded, step by step.

    Args:
        reference: folder of the run that counts as right.
        other: folder of the other.
        limit: the largest relative difference that is no failure.
        limits: the same for single values, by kind and name.
    """
    largest: dict[str, Difference] = {}
    left_out: dict[str, None] = {}
    first: Difference | None = None
    steps = 0
    for step, expected, found in _both(reference, other):
        steps = step
        for name, value in expected.items():
            if name not in found or found[name].shape != value.shape:
                left_out[name] = None
                continue
            difference = Difference(name, _apart(value, found[name]), step)
            if name not in largest or not difference.largest <= largest[name].largest:
                largest[name] = difference
            if first is None and not difference.largest <= limits.get(name, limit):
                first = difference
    return Compared(steps, tuple(largest.values()), tuple(left_out), first)


def names_of_numbers(folder: Path) -> frozenset[str]:
    """Names of the outputs of a run that are single numbers, as a loss is."""
    if steps_of(folder) == 0:
        return frozenset()
    with np.load(folder / "0.npz") as values:
        return frozenset(name for name, value in values.items() if kind_of(name) == OUTPUTS and value.ndim == 0)


def steps_of(folder: Path) -> int:
    """How many steps a run has recorded."""
    return len(list(folder.glob("*.npz")))


def kind_of(name: str) -> str:
    return name.partition(" ")[0]


def _apart(expected: NDArray[Any], found: NDArray[Any]) -> float:
    """Their relative difference; none where both have the same, be it infinite or no number."""
    if np.array_equal(expected, found, equal_nan=True):
        return 0.0
    return relative_difference(expected, found)


def _both(reference: Path, other: Path) -> Iterator[tuple[int, Values, Values]]:
    """The steps that both runs have, from 1, one after the other: a model may be large."""
    for step in range(min(steps_of(reference), steps_of(other))):
        with np.load(reference / f"{step}.npz") as one, np.load(other / f"{step}.npz") as two:
            yield step + 1, dict(one), dict(two)


def relative_difference(expected: NDArray[Any], found: NDArray[Any]) -> float:
    """The largest |expected - found| divided by the largest |expected|; infinite if a value of either is not finite.

    >>> relative_difference(np.array([1.0, 4.0]), np.array([1.0, 5.0]))
    0.25
    """
    a, b = expected.astype(np.float64), found.astype(np.float64)
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return math.inf
    difference, size = np.abs(a - b).max(initial=0.0), np.abs(a).max(initial=0.0)
    if difference == 0:
        return 0.0
    return float(difference / size) if size else math.inf
