"""Division of variables into shards along one axis: options, number of shards, and their lengths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from heapq import heapify, heappop, heappush, heapreplace
from math import lcm
from typing import Annotated

from pydantic import Field

from autodist.placement.partitioning import Partitioning, even_sizes, shard_name
from autodist.strategies.variables import SyncedVariable


def shards_of(variable: SyncedVariable, partitioning: Partitioning | None) -> tuple[SyncedVariable, ...]:
    """Returns the shards as separate variables; an unpartitioned variable is its only shard."""
    if partitioning is None:
        return (variable,)
    alike = {length: variable.first_shard(partitioning.axis, length) for length in set(partitioning.sizes)}
    return tuple(
        alike[length].named(shard_name(variable.name, index)) for index, length in enumerate(partitioning.sizes)
    )


def proportional_sizes(length: int, weights: Sequence[Fraction]) -> tuple[int, ...]:
    """Returns the lengths of one shard per weight, proportional to the weights after rounding, and at least 1.

    Each share is rounded down, and the remaining indices go to the largest remainders (A. Hamilton's method), the lower
    index first. A share below 1 becomes 1 at the cost of the shards that exceed their share most.

    >>> proportional_sizes(11, [Fraction(10), Fraction(100)])
    (1, 10)
    >>> proportional_sizes(7, [Fraction(1)] * 3)
    (3, 2, 2)

    Raises:
        ValueError: there are more weights than indices.
    """
    if not 0 < len(weights) <= length:
        raise ValueError(f"{length} indices cannot make {len(weights)} shards of at least one")
    scale = lcm(*(weight.denominator for weight in weights))
    parts = [int(weight * scale) for weight in weights]
    total = sum(parts)
    sizes = [max(1, length * part // total) for part in parts]
    # The excess length of each, in `total`ths of an index. Heaps, since there may be thousands of shards.
    excess = [size * total - length * part for size, part in zip(sizes, parts, strict=True)]
    missing = length - sum(sizes)
    shortest = list(zip(excess, range(len(sizes)), strict=True))
    heapify(shortest)
    for _ in range(missing):
        least, index = shortest[0]
        sizes[index] += 1
        heapreplace(shortest, (least + total, index))
    longest = [(-most, -index) for index, most in enumerate(excess) if sizes[index] > 1]
    heapify(longest)
    for _ in range(-missing):
        most, index = heappop(longest)
        sizes[-index] -= 1
        if sizes[-index] > 1:
            heappush(longest, (most + total, index))
    return tuple(sizes)


def partitionable_axes(variable: SyncedVariable) -> tuple[int, ...]:
    """Returns the axes along which a variable can be divided into at least two shards."""
    if variable.elements == 0:
        return ()
    return tuple(axis for axis, length in enumerate(variable.shape) if length > 1)


MIN_PARTITION_BYTES = 256 << 10
"""Sending this much takes 0.2 ms at 10 Gbit/s, the default bandwidth of a node: about the cost of another message
between workers. Smaller partitions cost more in messages than they save in waiting. TensorFlow's `MinSizePartitioner`
uses the same figure."""

FEW_WORKERS, PIECES = 4, 3
"""See `fair_shards`."""

Shards = Annotated[int, Field(ge=1)]
MinPartitionBytes = Annotated[int, Field(ge=0)]


@dataclass(frozen=True, kw_only=True)
class PartitionOptions:
    """Options of the builders that partition variables into a number of shards that the user may limit.

    Attributes:
        max_shards: the maximum number of shards of one variable; None: that of `fair_shards`. A variable with fewer
            indices along the axis has as many shards as indices.
        min_partition_bytes: smaller variables stay whole.
    """

    max_shards: Shards | None = None
    min_partition_bytes: MinPartitionBytes = MIN_PARTITION_BYTES

    def partitionings(
        self,
        variables: Sequence[SyncedVariable],
        workers: int,
        axis_of: Callable[[SyncedVariable], int] = lambda variable: 0,
    ) -> dict[str, Partitioning | None]:
        """Returns an even partitioning of each variable, by name; None for a variable that stays whole.

        Args:
            variables: the variables of the step.
            workers: number of workers that share the shards.
            axis_of: returns the axis along which a variable is partitioned.
        """
        shards = fair_shards(variables, workers)
        return {
            variable.name: even_partitioning(
                variable, axis_of(variable), self.max_shards or shards[variable.name], self.min_partition_bytes
            )
            for variable in variables
        }


def fair_shards(variables: Sequence[SyncedVariable], workers: int) -> dict[str, int]:
    """Returns the number of shards of each variable, so that the bytes of all can be divided between `workers`.

    Up to `FEW_WORKERS` workers, it is one per worker. Beyond that, a shard of every variable for every worker would
    need variables × workers messages and nodes. So a variable has as many shards as make each at most 1/`PIECES` of a
    worker's share, and at least `FEW_WORKERS`. In total these are fewer than (`FEW_WORKERS` + 1) · variables +
    `PIECES` · workers. If each shard goes to the worker with the least load, no worker exceeds its share by
    more than 1/`PIECES`. A variable with a third of all bytes has one shard per worker.
    """
    total = max(1, sum(variable.byte_size for variable in variables))
    return {
        variable.name: min(workers, max(FEW_WORKERS, -(-PIECES * workers * variable.byte_size // total)))
        for variable in variables
    }


def even_partitioning(variable: SyncedVariable, axis: int, shards: int, min_bytes: int) -> Partitioning | None:
    """Returns a partitioning into at most so many shards of equal length; None for a variable that stays whole."""
    if shards < 2 or variable.byte_size < min_bytes or axis not in partitionable_axes(variable):
        return None
    return Partitioning(axis, even_sizes(variable.shape[axis], shards))
