"""Records of a run: their settings, their differences between two runs, and the rounding that explains these."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

VARIABLE = "AUTODIST_RECORD"
"""Environment variable with the settings, as JSON."""

NOTES, ERROR = "notes.json", "error.json"
"""Files next to those of the steps: notes on the step, and the error that ended the script."""

VARIABLES, SLOTS, STATE, OUTPUTS = "variable", "slot", "state", "output"
"""Kinds of values, which precede their names."""

Values = Mapping[str, NDArray[Any]]
"""The values after one step, by kind and name."""

FLOAT64_LIMIT = 1e-9
"""The promised limit in float64."""

FLOORS = 10
"""The promised limit in other precisions, in rounding floors."""

LAST_BIT = float(np.finfo(np.float32).eps)
"""Lower bound of the rounding floor, since few steps may show none."""


@dataclass(frozen=True)
class Recording:
    """Settings of a recorded run.

    Attributes:
        folder: target folder; only the first worker writes there.
        steps: number of training steps, after which the script exits.
        in_float64: True if float64 is Keras's default dtype.
        is_reference: True if the step runs as captured, on one device.
        permutation: seed of the order of the examples of each batch; None: the script's order.
    """

    folder: str
    steps: int
    in_float64: bool
    is_reference: bool
    permutation: int | None = None

    def environment(self) -> dict[str, str]:
        """Returns the environment variables for the script's process."""
        return {VARIABLE: json.dumps(asdict(self)), "PYTHONHASHSEED": "0"}


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
        differences: the difference of each value that both runs have in one shape, in order.
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
        reference: the folder of the run that counts as right.
        other: the folder of the other run.
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


ALONE = 1e-2
"""Relative difference from which a value is pure rounding error, in precisions other than float64."""


class NoFloorError(Exception):
    """Error: the rounding floor could not be measured, with the reason."""


@dataclass(frozen=True)
class Rounding:
    """The rounding floors of one script.

    Attributes:
        floors: the largest relative difference in any step of any permuted run, by kind and name.
        numbers: names of scalar outputs, which no order of the examples may change.
        alone: the floors of values that are pure rounding error. The bias of a transformer's keys is one: its gradient
            is zero except for rounding, and Adam divides it by its own magnitude.
    """

    floors: Mapping[str, float]
    numbers: frozenset[str]
    alone: Mapping[str, float]

    @classmethod
    def of(cls, reference: Path, permuted: Sequence[Path], within: float) -> Rounding:
        """Compares runs on one device.

        Args:
            reference: folder of the run in the script's own order.
            permuted: folders of runs with other orders.
            within: the relative difference from which a value is pure rounding error, unless the order matters.

        Raises:
            NoFloorError: the order of the examples matters to the step.
        """
        floors: dict[str, float] = {}
        for run in permuted:
            for difference in compare(reference, run, 0.0).differences:
                floors[difference.name] = max(difference.largest, floors.get(difference.name, 0.0))
        alone = {name: floor for name, floor in floors.items() if kind_of(name) != OUTPUTS and floor > within}
        rounding = cls(floors, names_of_numbers(reference), alone)
        rounding._require_unordered(within)
        return rounding

    @classmethod
    def in_float64(cls, reference: Path, permuted: Sequence[Path]) -> Rounding:
        """Compares runs on one device in float64; a part of their step may round as float32 does.

        TensorFlow's CTC loss does so with any dtype, and a layer or loss may cast to float32.

        Raises:
            NoFloorError: the order of the examples matters to the step.
        """
        try:
            return cls.of(reference, permuted, FLOAT64_LIMIT / FLOORS)
        except NoFloorError as error:
            try:
                coarse = cls.of(reference, permuted, ALONE)
            except NoFloorError:
                raise error from None
            if max([coarse.floor, *(coarse.floors.get(name, 0.0) for name in coarse.numbers)]) > FLOORS * LAST_BIT:
                raise
            return coarse

    @property
    def floor(self) -> float:
        """The largest floor of a variable, slot or state that is not pure rounding error."""
        rest = [floor for name, floor in self.floors.items() if kind_of(name) != OUTPUTS and name not in self.alone]
        return max(rest, default=0.0)

    @property
    def limits(self) -> dict[str, float]:
        """The largest relative difference that rounding explains, by name, for values that are pure rounding error."""
        return {name: FLOORS * floor for name, floor in self.alone.items() if math.isfinite(floor)}

    def _require_unordered(self, within: float) -> None:
        """Passes unless another order of the examples changes the loss, or half of the trained variables."""
        for name in sorted(self.numbers & self.floors.keys()):
            if not self.floors[name] <= within:
                raise NoFloorError(_order_matters(f"{name} by {self.floors[name]:.1e}"))
        trained = [name for name in self.floors if kind_of(name) == VARIABLES]
        changed = [name for name in trained if name in self.alone]
        if changed and 2 * len(changed) >= len(trained):
            raise NoFloorError(_order_matters(f"{len(changed)} of {len(trained)} variables"))


def limit_of(floor: float) -> float:
    """Returns the promised relative difference if one device differs from itself by `floor`."""
    return max(FLOORS * floor, LAST_BIT)


def _order_matters(what: str) -> str:
    return f"one device trains something else when the examples of each batch are permuted, which changes {what}"
