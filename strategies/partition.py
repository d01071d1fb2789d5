"""Partition: how the user says that a variable is to be cut."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from autodist.errors import StrategyError
from autodist.graph.placement import Partitioning
from autodist.options.fields import check_options
from autodist.strategies.cut import even_sizes
from autodist.strategies.variables import SyncedVariable


@dataclass(frozen=True)
class Partition:
    """A cut of whichever variables a pattern matches, in a number of shards or in shards of these lengths.

    Attributes:
        axis: along which, counted from 0.
        shards: how many, of lengths that differ by one at most; 1 leaves the variable whole.
        sizes: length of each shard along the axis, in place of `shards`.

    Raises:
        StrategyError: when not exactly one of `shards` and `sizes` is given, or a value is out of range.
    """

    axis: Annotated[int, Field(ge=0, lt=2**31)] = 0
    shards: Annotated[int, Field(ge=1)] | None = None
    sizes: tuple[Annotated[int, Field(ge=1)], ...] | None = None

    def __post_init__(self) -> None:
        check_options(self)
        if (self.shards is None) == (self.sizes is None):
            given = "neither shards nor sizes" if self.shards is None else "both shards and sizes"
            raise StrategyError(f"{given} are given; say how many shards, or the length of each.")
        if self.sizes == ():
            raise StrategyError("sizes is empty; give the length of each shard.")

    def cut(self, variable: SyncedVariable) -> Partitioning | None:
        """The cut of one variable; None if it stays whole.

        Raises:
            StrategyError: when the variable cannot be cut so; names the variable, the reason and the mend.
        """
        if self.sizes is not None:
            cut = Partitioning(self.axis, self.sizes)
            require_cut(variable, cut)
            return cut
        if self.shards is None or self.shards == 1:
            return None
        _require(variable, _axis_fault(variable, self.axis, self.shards))
        return Partitioning(self.axis, even_sizes(variable.shape[self.axis], self.shards))


def require_cut(variable: SyncedVariable, cut: Partitioning) -> None:
    """Passes a cut that the variable can have.

    Raises:
        StrategyError: names the variable, the reason and the mend.
    """
    _require(variable, _axis_fault(variable, cut.axis, len(cut.sizes)) or _sizes_fault(variable, cut))


def _require(variable: SyncedVariable, fault: str | None) -> None:
    if fault is not None:
        raise StrategyError(f"{variable.name} cannot be partitioned: {fault}.")


def _axis_fault(variable: SyncedVariable, axis: int, shards: int) -> str | None:
    """Why a variable cannot have so many shards along an axis, with the mend; None if it can."""
    shape = _shape(variable)
    if not variable.shape:
        return "it is a scalar, which has no axis to cut; leave its partition out"
    if variable.elements == 0:
        return f"its shape is {shape}, so it has no element; leave its partition out"
    if not 0 <= axis < len(variable.shape):
        last = len(variable.shape) - 1
        allowed = f"an axis from 0 to {last}" if last else "axis 0"
        return f"axis {axis} is out of range of its shape {shape}; take {allowed}"
    length = variable.shape[axis]
    if shards > length:
        return (
            f"{shards} shards are more than the {length} indices of its axis {axis} (its shape is {shape}); "
            f"take at most {length}"
        )
    return None


def _sizes_fault(variable: SyncedVariable, cut: Partitioning) -> str | None:
    """Why shards of these lengths do not make up the axis, with the mend; None if they do."""
    length, sizes = variable.shape[cut.axis], list(cut.sizes)
    if min(sizes, default=0) < 1:
        return f"the sizes {sizes} do not give each shard at least 1; leave empty shards out"
    if sum(sizes) != length:
        return (
            f"the sizes {sizes} add up to {sum(sizes)}, and its axis {cut.axis} has {length} indices "
            f"(its shape is {_shape(variable)}); make them add up to {length}"
        )
    return None


def _shape(variable: SyncedVariable) -> str:
    return " × ".join(str(length) for length in variable.shape)
