"""PartitionedAR: partitions large variables and all-reduces each shard separately."""

from __future__ import annotations

from dataclasses import dataclass

from autodist.proto import strategy_pb2
from autodist.resources import ResourceSpec
from autodist.strategies.all_reduce import AllReduceOptions
from autodist.strategies.base import StrategyBuilder, make_strategy, workers_with_replicas
from autodist.strategies.nodes import node_of
from autodist.strategies.partitioning import PartitionOptions
from autodist.strategies.registry import register
from autodist.strategies.variables import GraphLike, SyncedVariable, synced_variables


@register
@dataclass(frozen=True)
class PartitionedAR(AllReduceOptions, PartitionOptions, StrategyBuilder):
    """All-reduces shards: partitions large variables along axis 0, and reduces each shard like a variable.

    For models with variables much larger than a bucket. The shards are reduced and applied in sequence: the first
    shards are applied while the last are still being sent.

    Cost: as AllReduce: with W workers and b bytes of dense gradients, each worker sends 2·b·(W-1)/W bytes a step and
    receives as many. The number of messages grows with the number of shards.

    Source: Y. Peng et al., "A Generic Communication Scheduler for Distributed DNN Training Acceleration", SOSP 2019,
    for reducing large tensors in parts; the bytes as in AllReduce.

    Attributes:
        chunk_size: number of shards and whole variables that are packed into buckets together; 1 reduces each
            separately.
        all_reduce_spec, compressor: see AllReduceOptions.
        max_shards, min_partition_bytes: see PartitionOptions.
    """

    def build(self, graph_item: GraphLike, resource_spec: ResourceSpec) -> strategy_pb2.Strategy:
        variables = synced_variables(graph_item)
        partitionings = self.partitionings(variables, len(workers_with_replicas(resource_spec)), self.axis_of)
        nodes, position = [], 0
        for name, partitioning in partitionings.items():
            count = 1 if partitioning is None else len(partitioning.sizes)
            nodes.append(node_of(name, partitioning, [self.all_reduce(position + index) for index in range(count)]))
            position += count
        return make_strategy(type(self).__name__, resource_spec, variables, nodes)

    def axis_of(self, variable: SyncedVariable) -> int:
        """Returns the axis along which a variable is partitioned."""
        return 0
