"""RandomAxisPartitionAR: partitions large variables along a random axis."""

from __future__ import annotations

import random
from dataclasses import dataclass

from autodist.strategies.partitioned_ar import PartitionedAR
from autodist.strategies.partitioning import partitionable_axes
from autodist.strategies.registry import register
from autodist.strategies.variables import SyncedVariable


@register
@dataclass(frozen=True)
class RandomAxisPartitionAR(PartitionedAR):
    """PartitionedAR with the axis of each variable chosen at random among those with at least two indices.

    For searching the space of strategies by sampling, and for models whose first axes are short, such as convolutions.
    Sparse variables are partitioned along axis 0, since their gradients come in rows. The choice only depends on the
    seed and the variable's name, so that equal inputs yield equal strategies.

    Cost: that of PartitionedAR.

    Source: H. Zhang et al., "AutoSync: Learning to Synchronize for Data-Parallel Distributed Deep Learning",
    NeurIPS 2020; its space of strategies includes the axis as a dimension.

    Attributes:
        seed: the seed of the random choice.
        chunk_size, all_reduce_spec, compressor: see PartitionedAR.
        max_shards, min_partition_bytes: see PartitionOptions.
    """

    seed: int = 0

    def axis_of(self, variable: SyncedVariable) -> int:
        axes = (0,) if variable.is_sparse else partitionable_axes(variable)
        return random.Random(f"{self.seed} {variable.name}").choice(axes or (0,))
