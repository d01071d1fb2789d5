"""Partition: the user's specification of a variable's partitioning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from autodist.errors import StrategyError
from autodist.logs.formatting import readable_shape
from autodist.options.fields import check_options
from autodist.placement.partitioning import Partitioning, even_sizes
from autodist.strategies.variables import SyncedVariable


@dataclass(frozen=True)
class Partition:
    """A partitioning of the variables that a pattern matches, by number of shards or by their lengths.

    Attributes:
        axis: the partitioned axis, counted from 0.
        shards: number of shards, with lengths that differ by at most one; 1 leaves the variable whole.
        sizes: length of each shard along the axis, instead of `shards`.

    Raises:
        StrategyError: not exactly one of `shards` and `sizes` is set, or a value is out of range.
    """

    axis: Annotated[int, Field(ge=0, lt=2**31)] = 0
    shards: Annotated[int, Field(ge=1)] | None = None
    sizes: tuple[Annotated[int, Field(ge=1)], ...] | None = None

    def __post_init__(self) -> None:
        check_options(self)
        if (self.shards is None) == (self.sizes is None):
            found = "neither shards nor sizes" if self.shards is None else "both shards and sizes"
            raise StrategyError(f"{found} are given; specify the number of shards, or the length of each.")
        if self.sizes == ():
            raise StrategyError("sizes is empty; specify the length of each shard.")

    def partitioning(self, variable: SyncedVariable) -> Partitioning | None:
        """Returns the partitioning of one variable; None if it stays whole.

        Raises:
            StrategyError: the variable cannot be partitioned in this way; names the variable, the reason and the fix.
        """
        if self.sizes is not None:
            partitioning = Partitioning(self.axis, self.sizes)
            require_partitioning(variable, partitioning)
            return partitioning
        if self.shards is None or self.shards == 1:
            return None
        _require(variable, _axis_fault(variable, self.axis, self.shards))
        return Partitioning(self.axis, even_sizes(variable.shape[self.axis], self.shards))


def require_partitioning(variable: SyncedVariable, partitioning: Partitioning) -> None:
    """Checks that a variable can have a partitioning.

    Raises:
        StrategyError: names the variable, the reason and the fix.
    """
    _require(
        variable,
        _axis_fault(variable, partitioning.axis, len(partitioning.sizes)) or _sizes_fault(variable, partitioning),
    )


def _require(variable: SyncedVariable, fault: str | None) -> None:
    if fault is not None:
        raise StrategyError(f"{variable.name} cannot be partitioned: {fault}.")


def _axis_fault(variable: SyncedVariable, axis: int, shards: int) -> str | None:
    """Returns the reason why a variable cannot have so many shards along an axis, with the fix; None if it can."""
    shape = readable_shape(variable.shape)
    if not variable.shape:
        return "it is a scalar, which has no axis to cut; leave its partition out"
    if variable.elements == 0:
        return f"its shape is {shape}, so it has no element; leave its partition out"
    if not 0 <= axis < len(variable.shape):
        last = len(variable.shape) - 1
        allowed = f"an axis from 0 to {last}" if last else "axis 0"
        return f"axis {axis} is out of range of its shape {shape}; use {allowed}"
    length = variable.shape[axis]
    if shards > length:
        return (
            f"{shards} shards are more than the {length} indices of its axis {axis} (its shape is {shape}); "
            f"use at most {length}"
        )
    return None


def _sizes_fault(variable: SyncedVariable, partitioning: Partitioning) -> str | None:
    """Returns the reason why the sizes of shards do not fit the axis, with the fix; None if they do."""
    length, sizes = variable.shape[partitioning.axis], list(partitioning.sizes)
    if min(sizes, default=0) < 1:
        return f"the sizes {sizes} must be one or more lengths of at least 1; leave empty shards out"
    if sum(sizes) != length:
        return (
            f"the sizes {sizes} sum to {sum(sizes)}, but its axis {partitioning.axis} has {length} indices "
            f"(its shape is {readable_shape(variable.shape)}); make them sum to {length}"
        )
    return None
