"""ShardedAllReduce: each worker updates its shard of every variable, and holds the slots of that shard alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from autodist.compressors import NO_COMPRESSOR, Compressor
from autodist.placement.partitioning import Partitioning
from autodist.proto import strategy_pb2
from autodist.resources import ResourceSpec
from autodist.strategies.base import StrategyBuilder, make_strategy, workers_with_replicas
from autodist.strategies.loads import GreedyLoads
from autodist.strategies.nodes import partitioned_node
from autodist.strategies.partitioning import (
    MIN_PARTITION_BYTES,
    MinPartitionBytes,
    even_partitioning,
    fair_shards,
    partitionable_axes,
    shards_of,
)
from autodist.strategies.ps import SYNCHRONOUS, ServerOptions, parameter_server_node
from autodist.strategies.registry import register
from autodist.strategies.variables import GraphLike, SyncedVariable, synced_variables

NEARLY_EVEN = Fraction(21, 20)
"""An earlier axis is chosen if its largest shard is at most this factor larger than that of the best axis: shards of
an earlier axis are contiguous in memory, so splitting and joining need fewer, longer copies."""


@register
@dataclass(frozen=True)
class ShardedAllReduce(StrategyBuilder):
    """Reduce-scatters gradients to the owners of shards; each updates its shard, and the values are all-gathered.

    For models whose optimizer keeps much state. As in ZeRO stage 1, each worker holds the slots of 1/W of the elements
    and computes 1/W of the update. Every large variable is partitioned: sparse ones along axis 0, others along the
    first axis with nearly equal shards. There is one shard for each worker that has replicas, in worker order. With
    many workers there are fewer, just enough to share the bytes evenly (`fair_shards`), on the least loaded workers.
    Small variables stay whole, with owners balanced by bytes. With one worker nothing is partitioned.

    Cost: with W workers and b bytes of dense gradients, each worker sends b·(W-1)/W bytes of gradients and b·(W-1)/W of
    values a step. It receives as many. In total this is 2·b·(W-1)/W, like all-reduce. Slots: 1/W per worker.

    Source: S. Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020.

    Attributes:
        min_partition_bytes: smaller variables stay whole.
        value_compressor: encodes the values that are all-gathered; see ServerOptions. With INT8, a worker sends 5/8 of
            the bytes. Source: G. Wang et al., "ZeRO++", arXiv:2306.10209 (qwZ).
    """

    min_partition_bytes: MinPartitionBytes = MIN_PARTITION_BYTES
    value_compressor: Compressor = NO_COMPRESSOR

    def build(self, graph_item: GraphLike, resource_spec: ResourceSpec) -> strategy_pb2.Strategy:
        variables = synced_variables(graph_item)
        owners = workers_with_replicas(resource_spec)
        shards = fair_shards(variables, len(owners))
        loads, servers = GreedyLoads(resource_spec, owners), ServerOptions(value_compressor=self.value_compressor)
        nodes = sharded_nodes(variables, loads, shards, self.min_partition_bytes, servers)
        return make_strategy("ShardedAllReduce", resource_spec, variables, nodes)


def sharded_nodes(
    variables: Sequence[SyncedVariable],
    loads: GreedyLoads,
    shards: Mapping[str, int],
    min_partition_bytes: int,
    servers: ServerOptions = SYNCHRONOUS,
) -> list[strategy_pb2.VariableNode]:
    """Returns nodes with a shard of each large variable for each owner, and small ones that share the bytes evenly.

    Args:
        variables: the variables of the step.
        loads: the owners, and the bytes that they own already.
        shards: the number of shards of each variable, by name.
        min_partition_bytes: smaller variables stay whole.
        servers: the options of the owners.
    """
    nodes: list[strategy_pb2.VariableNode] = []
    left: list[SyncedVariable] = []
    for variable in variables:
        axis = 0 if variable.is_sparse else nearly_even_axis(variable, shards[variable.name])
        partitioning = even_partitioning(variable, axis, shards[variable.name], min_partition_bytes)
        if partitioning is None:
            left.append(variable)
        else:
            nodes.append(_sharded(variable, partitioning, loads, servers))
    sent_whole = {variable.name: variable.is_sent_whole for variable in left}
    for name, owner in loads.place_all(left).items():
        nodes.append(parameter_server_node(name, owner, servers, is_sent_whole=sent_whole[name]))
    return nodes


def nearly_even_axis(variable: SyncedVariable, shards: int) -> int:
    """Returns the first axis whose largest shard is nearly as small as that of the best axis; 0 if there is none."""
    largest = {
        axis: Fraction(-(-variable.shape[axis] // shards), variable.shape[axis])
        for axis in partitionable_axes(variable)
    }
    least = min(largest.values(), default=Fraction(1))
    return next((axis for axis, share in largest.items() if share <= NEARLY_EVEN * least), 0)


def _sharded(
    variable: SyncedVariable, partitioning: Partitioning, loads: GreedyLoads, servers: ServerOptions
) -> strategy_pb2.VariableNode:
    """Places shard k on the k-th owner; with fewer shards than owners, on the least loaded owners."""
    count = len(partitioning.sizes)
    owners = loads.owners if count == len(loads.owners) else sorted(loads.least_loaded(count))
    for owner, shard in zip(owners, shards_of(variable, partitioning), strict=True):
        loads.add(owner, shard.byte_size)
    messages = [servers.parameter_server(owner, is_sent_whole=variable.is_sent_whole) for owner in owners]
    return partitioned_node(variable.name, partitioning, messages)
