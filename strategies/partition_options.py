"""PartitionOptions: which variables are worth cutting, and in how many shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from autodist.graph.placement import Partitioning
from autodist.strategies.cut import axes_to_cut, even_sizes
from autodist.strategies.variables import SyncedVariable

MIN_PARTITION_BYTES = 256 << 10
"""At 10 Gbit/s, the bandwidth of a node that names none, they travel in 0.2 ms, about what one message more from worker
to worker costs. Cutting less makes more messages than it saves waiting. TensorFlow's `MinSizePartitioner` has the same
figure."""

FEW_WORKERS, PIECES = 4, 3
"""See `fair_shards`."""

Shards = Annotated[int, Field(ge=1)]
MinPartitionBytes = Annotated[int, Field(ge=0)]


@dataclass(frozen=True, kw_only=True)
class PartitionOptions:
    """Options of the builders that cut variables in a number of shards that the user may bound.

    Attributes:
        max_shards: the most shards of one variable; None: as many as `fair_shards` says. A variable with fewer indices
            along the axis has as many shards as indices.
        min_partition_bytes: a variable of fewer bytes stays whole.
    """

    max_shards: Shards | None = None
    min_partition_bytes: MinPartitionBytes = MIN_PARTITION_BYTES

    def cut(self, variable: SyncedVariable, axis: int, shards: int) -> Partitioning | None:
        """An even cut along an axis; None if the variable should stay whole, or cannot be cut there.

        Args:
            variable: that may be cut.
            axis: along which.
            shards: in so many, where the user bounds them by no `max_shards`.
        """
        return even_cut(variable, axis, self.max_shards or shards, self.min_partition_bytes)


def fair_shards(variables: Sequence[SyncedVariable], workers: int) -> dict[str, int]:
    """In how many shards each variable is to be cut, so that `workers` can share the bytes of all.

    Up to `FEW_WORKERS` it is one for each worker. Beyond, a shard of every variable for every worker would make as many
    messages, and nodes of the step, as variables × workers; a variable then has so many shards that each is at most
    1/`PIECES` of a worker's share, and at least `FEW_WORKERS`. Together these are fewer than (`FEW_WORKERS` + 1) ·
    variables + `PIECES` · workers, and who gets the next one where the load is least has at most 1/`PIECES` more than
    its share. A variable that is a third of all there is has one for each worker.
    """
    total = max(1, sum(variable.byte_size for variable in variables))
    return {
        variable.name: min(workers, max(FEW_WORKERS, -(-PIECES * workers * variable.byte_size // total)))
        for variable in variables
    }


def even_cut(variable: SyncedVariable, axis: int, shards: int, min_bytes: int) -> Partitioning | None:
    """A cut in at most so many shards of equal length; None for a variable that stays whole."""
    if shards < 2 or variable.byte_size < min_bytes or axis not in axes_to_cut(variable):
        return None
    return Partitioning(axis, even_sizes(variable.shape[axis], shards))
