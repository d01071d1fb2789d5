"""UnevenPartitionedPS: the lengths of shards are proportional to the bandwidths of their owners."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from autodist.placement.partitioning import Partitioning
from autodist.proto import strategy_pb2
from autodist.resources import ResourceSpec
from autodist.strategies.base import StrategyBuilder, make_strategy
from autodist.strategies.loads import GreedyLoads, worker_bandwidths
from autodist.strategies.nodes import partitioned_node
from autodist.strategies.partitioning import (
    PartitionOptions,
    even_partitioning,
    fair_shards,
    proportional_sizes,
    shards_of,
)
from autodist.strategies.ps import ServerOptions, parameter_server_node
from autodist.strategies.registry import register
from autodist.strategies.variables import GraphLike, SyncedVariable, synced_variables


@register
@dataclass(frozen=True)
class UnevenPartitionedPS(ServerOptions, PartitionOptions, StrategyBuilder):
    """Parameter servers with shards whose lengths are proportional to the bandwidths of their owners.

    For machines with links of unequal speed: all links are busy equally long, whatever the size of a variable.
    Large variables are partitioned along axis 0 into at most one shard per owner. If there are fewer shards than
    owners, the owners with the least load relative to their bandwidth get one. Whole variables are assigned in the same
    way.

    Cost: with W workers, the fraction s_k of all bandwidth at worker k, and b bytes of dense gradients, worker
    k sends s_k·b·(W-1) bytes a step as an owner and (1-s_k)·b as a worker, and receives as many.

    Source: A. Kalinov and A. Lastovetsky, "Heterogeneous Distribution of Computations Solving Linear Algebra Problems
    on Networks of Heterogeneous Computers", J. Parallel Distrib. Comput. 61(4), 2001, for shares proportional to
    speed; integers by A. Hamilton's method.

    Attributes:
        max_shards, min_partition_bytes: see PartitionOptions.
        sync, staleness, local_proxy_variable: see ServerOptions.
    """

    def build(self, graph_item: GraphLike, resource_spec: ResourceSpec) -> strategy_pb2.Strategy:
        variables = synced_variables(graph_item)
        loads, bandwidths = GreedyLoads(resource_spec), worker_bandwidths(resource_spec)
        # As in GreedyLoads.place_all: the largest first, since small ones fill the remaining gaps.
        ordered = sorted(variables, key=lambda variable: (-variable.byte_size, variable.name))
        shards = fair_shards(variables, len(loads.owners))
        nodes = [self._node(variable, shards[variable.name], loads, bandwidths) for variable in ordered]
        return make_strategy("UnevenPartitionedPS", resource_spec, variables, nodes)

    def _node(
        self, variable: SyncedVariable, shards: int, loads: GreedyLoads, bandwidths: tuple[Fraction, ...]
    ) -> strategy_pb2.VariableNode:
        """Returns the node of a variable, and adds the bytes of its shards to the loads of their owners."""
        shards = min(self.max_shards or shards, len(loads.owners))
        even = even_partitioning(variable, 0, shards, self.min_partition_bytes)
        if even is None:
            owner = loads.place(variable.byte_size)
            return parameter_server_node(variable.name, owner, self, is_sent_whole=variable.is_sent_whole)
        owners = sorted(loads.least_loaded(len(even.sizes)))
        partitioning = Partitioning(0, proportional_sizes(variable.shape[0], [bandwidths[owner] for owner in owners]))
        servers = [self.parameter_server(owner, is_sent_whole=variable.is_sent_whole) for owner in owners]
        node = partitioned_node(variable.name, partitioning, servers)
        for owner, shard in zip(owners, shards_of(variable, partitioning), strict=True):
            loads.add(owner, shard.byte_size)
        return node
