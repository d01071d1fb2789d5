"""PartitionOptions: which variables are worth cutting, and in how many shards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from autodist.graph.placement import Cut
from autodist.strategies.cut import axes_to_cut, even_sizes
from autodist.strategies.variables import SyncedVariable

MIN_PARTITION_BYTES = 256 << 10
"""At 10 Gbit/s, the bandwidth of a node that names none, they travel in 0.2 ms, about what one message more from worker
to worker costs. Cutting less makes more messages than it saves waiting. TensorFlow's `MinSizePartitioner` has the same
figure."""

Shards = Annotated[int, Field(ge=1)]
MinPartitionBytes = Annotated[int, Field(ge=0)]


@dataclass(frozen=True, kw_only=True)
class PartitionOptions:
    """Options of the builders that cut variables in a number of shards that the user may bound.

    Attributes:
        max_shards: the most shards of one variable; None: one for each worker that may own one. A variable with fewer
            indices along the axis has as many shards as indices.
        min_partition_bytes: a variable of fewer bytes stays whole.
    """

    max_shards: Shards | None = None
    min_partition_bytes: MinPartitionBytes = MIN_PARTITION_BYTES

    def cut(self, variable: SyncedVariable, axis: int, workers: int) -> Cut | None:
        """An even cut along an axis; None if the variable should stay whole, or cannot be cut there.

        Args:
            variable: that may be cut.
            axis: along which.
            workers: how many may own a shard.
        """
        return even_cut(variable, axis, self.max_shards or workers, self.min_partition_bytes)


def even_cut(variable: SyncedVariable, axis: int, shards: int, min_bytes: int) -> Cut | None:
    """A cut in at most so many shards of equal length; None for a variable that stays whole."""
    if shards < 2 or variable.byte_size < min_bytes or axis not in axes_to_cut(variable):
        return None
    return Cut(axis, even_sizes(variable.shape[axis], shards))
