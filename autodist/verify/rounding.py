"""Rounding floors: differences between runs of one device whose examples are permuted."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from autodist.verify.compare import FLOORS, LAST_BIT, compare, kind_of, names_of_numbers
from autodist.verify.recording import OUTPUTS, VARIABLES

ALONE = 1e-2
"""Relative difference from which a value is pure rounding error, in precisions other than float64."""


class NoFloorError(Exception):
    """Error: the rounding floor could not be measured, with the reason."""


@dataclass(frozen=True)
class Rounding:
    """The rounding floors of one script.

    Attributes:
        floors: by kind and name, the largest relative difference in any step of any permuted run.
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
