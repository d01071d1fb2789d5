"""Differences between the recorded steps of two runs."""

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
"""The values after one step, by kind and name."""

FLOAT64_LIMIT = 1e-9
"""The promised limit in float64."""

FLOORS = 10
"""The promised limit in other precisions, in rounding floors."""

LAST_BIT = float(np.finfo(np.float32).eps)
"""Lower bound of the rounding floor, since few steps may show none."""


@dataclass(frozen=True)
class Difference:
    """Largest difference of one value between the two runs.

    Attributes:
        name: kind and name of the value.
        largest: the largest relative difference in any step.
        at: the step with that difference, from 1.
    """

    name: str
    largest: float
    at: int


@dataclass(frozen=True)
class Compared:
    """Result of comparing two runs.

    Attributes:
        steps: number of steps that both have.
        differences: of each value that both have in one shape, in order.
        left_out: names of values with different shapes, such as rows of a part of the batch.
        first: the first value beyond its limit in the first such step; None: there is none.
    """

    steps: int
    differences: tuple[Difference, ...]
    left_out: tuple[str, ...]
    first: Difference | None


def compare(reference: Path, other: Path, limit: float, limits: Mapping[str, float] = MappingProxyType({})) -> Compared:
    """Compares the recorded values of two runs, step by step.

    Args:
        reference: folder of the run that counts as right.
        other: folder of the other.
        limit: the largest accepted relative difference.
        limits: limits of individual values, by kind and name.
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
            difference = Difference(name, _difference(value, found[name]), step)
            if name not in largest or not difference.largest <= largest[name].largest:
                largest[name] = difference
            if first is None and not difference.largest <= limits.get(name, limit):
                first = difference
    return Compared(steps, tuple(largest.values()), tuple(left_out), first)


def names_of_numbers(folder: Path) -> frozenset[str]:
    """Returns the names of the scalar outputs of a run, such as a loss."""
    if steps_of(folder) == 0:
        return frozenset()
    with np.load(folder / "0.npz") as values:
        return frozenset(name for name, value in values.items() if kind_of(name) == OUTPUTS and value.ndim == 0)


def steps_of(folder: Path) -> int:
    """Returns the number of steps that a run has recorded."""
    return len(list(folder.glob("*.npz")))


def kind_of(name: str) -> str:
    return name.partition(" ")[0]


def _difference(expected: NDArray[Any], found: NDArray[Any]) -> float:
    """Returns the relative difference; 0 if both are equal, even if infinite or NaN."""
    if np.array_equal(expected, found, equal_nan=True):
        return 0.0
    return relative_difference(expected, found)


def _both(reference: Path, other: Path) -> Iterator[tuple[int, Values, Values]]:
    """Yields the steps that both runs have, from 1, one at a time, since a model may be large."""
    for step in range(min(steps_of(reference), steps_of(other))):
        with np.load(reference / f"{step}.npz") as one, np.load(other / f"{step}.npz") as two:
            yield step + 1, dict(one), dict(two)


def relative_difference(expected: NDArray[Any], found: NDArray[Any]) -> float:
    """Returns the largest |expected - found| divided by the largest |expected|; inf if any value is not finite.

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
