"""PartitionOptions: selects the variables to partition, and the number of their shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from autodist.graph.placement import Partitioning
from autodist.strategies.cut import axes_to_cut, even_sizes
from autodist.strategies.variables import SyncedVariable

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

    def cut(self, variable: SyncedVariable, axis: int, shards: int) -> Partitioning | None:
        """Returns an even partitioning along an axis; None if the variable should stay whole or cannot be partitioned.

        Args:
            variable: the variable.
            axis: the axis to partition.
            shards: number of shards, unless the user sets `max_shards`.
        """
        return even_cut(variable, axis, self.max_shards or shards, self.min_partition_bytes)


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


def even_cut(variable: SyncedVariable, axis: int, shards: int, min_bytes: int) -> Partitioning | None:
    """Returns a partitioning into at most so many shards of equal length; None for a variable that stays whole."""
    if shards < 2 or variable.byte_size < min_bytes or axis not in axes_to_cut(variable):
        return None
    return Partitioning(axis, even_sizes(variable.shape[axis], shards))
