"""PartitionedAR: partitions large variables and all-reduces each shard separately."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autodist.graph.placement import Partitioning
from autodist.proto import strategy_pb2
from autodist.resources import ResourceSpec
from autodist.strategies.all_reduce_options import AllReduceOptions
from autodist.strategies.base import StrategyBuilder, make_strategy, workers_with_replicas
from autodist.strategies.nodes import node_of
from autodist.strategies.partition_options import PartitionOptions, fair_shards
from autodist.strategies.registry import register
from autodist.strategies.variables import GraphLike, SyncedVariable, synced_variables


@register
@dataclass(frozen=True)
class PartitionedAR(AllReduceOptions, PartitionOptions, StrategyBuilder):
    """All-reduces shards: large variables are partitioned along axis 0, and each shard is a member of a group.

    For models with variables much larger than a bucket: the shards are reduced and applied in sequence, so that the
    first shards are applied while the last are still being sent.

    Cost: as AllReduce: with W workers and b bytes of dense gradients, each worker sends 2·b·(W-1)/W bytes a step and
    receives as many; the number of messages grows with that of shards.

    Source: Y. Peng et al., "A Generic Communication Scheduler for Distributed DNN Training Acceleration", SOSP 2019,
    for reducing large tensors in parts; the bytes as in AllReduce.

    Attributes:
        chunk_size: number of shards and whole variables in a group; 1 reduces each shard separately.
        all_reduce_spec, compressor: see AllReduceOptions.
        max_shards, min_partition_bytes: see PartitionOptions.
    """

    def build(self, graph_item: GraphLike, resource_spec: ResourceSpec) -> strategy_pb2.Strategy:
        variables = synced_variables(graph_item)
        workers = len(workers_with_replicas(resource_spec))
        shards = fair_shards(variables, workers)
        cuts = {variable.name: self.cut(variable, 0, shards[variable.name]) for variable in variables}
        nodes = partitioned_all_reduce_nodes(variables, cuts, self)
        return make_strategy("PartitionedAR", resource_spec, variables, nodes)


def partitioned_all_reduce_nodes(
    variables: Sequence[SyncedVariable], cuts: Mapping[str, Partitioning | None], options: AllReduceOptions
) -> list[strategy_pb2.VariableNode]:
    """Returns a node for each variable, with groups of `chunk_size` shards.

    Args:
        variables: in the order in which they are grouped.
        cuts: the partitioning of each, by name.
        options: of all-reduce.
    """
    nodes, position = [], 0
    for variable in variables:
        cut = cuts[variable.name]
        count = 1 if cut is None else len(cut.sizes)
        synchronizers = [options.all_reduce(position + index) for index in range(count)]
        nodes.append(node_of(variable.name, cut, synchronizers))
        position += count
    return nodes
