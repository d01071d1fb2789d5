"""UnevenPartitionedPS: the faster a worker's link, the longer its shards."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from autodist.graph.placement import Partitioning
from autodist.proto import strategy_pb2
from autodist.resources import ResourceSpec
from autodist.strategies.base import StrategyBuilder, make_strategy
from autodist.strategies.cut import proportional_sizes, shards_of
from autodist.strategies.loads import GreedyLoads, worker_bandwidths
from autodist.strategies.nodes import partitioned_node
from autodist.strategies.partition_options import PartitionOptions, even_cut, fair_shards
from autodist.strategies.ps import parameter_server_node
from autodist.strategies.registry import register
from autodist.strategies.server_options import ServerOptions
from autodist.strategies.variables import GraphLike, SyncedVariable, synced_variables


@register
@dataclass(frozen=True)
class UnevenPartitionedPS(ServerOptions, PartitionOptions, StrategyBuilder):
    """Parameter servers of shards whose lengths are in proportion to the bandwidths of their owners.

    For machines with links of unequal speed: each link is busy equally long with what its worker owns, however large a
    variable is.
    Large variables are cut along axis 0 into at most one shard for each owner; where there are fewer shards than
    owners, those get one that have the least load for their bandwidth. Whole variables are dealt out likewise.

    Cost: with W workers, of which worker k has the share s_k of all bandwidth, and b bytes of dense gradients, worker
    k sends s_k·b·(W-1) bytes a step as an owner and (1-s_k)·b as a worker, and receives as many.

    Source: A. Kalinov and A. Lastovetsky, "Heterogeneous Distribution of Computations Solving Linear Algebra Problems
    on Networks of Heterogeneous Computers", J. Parallel Distrib. Comput. 61(4), 2001, for shares in proportion to
    speed; whole numbers by A. Hamilton's method.

    Attributes:
        max_shards, min_partition_bytes: see PartitionOptions.
        sync, staleness, local_proxy_variable: see ServerOptions.
    """

    def build(self, graph_item: GraphLike, resource_spec: ResourceSpec) -> strategy_pb2.Strategy:
        variables = synced_variables(graph_item)
        loads, bandwidths = GreedyLoads(resource_spec), worker_bandwidths(resource_spec)
        # As in GreedyLoads.place_all: the largest first, since small ones fill what gaps remain.
        ordered = sorted(variables, key=lambda variable: (-variable.byte_size, variable.name))
        shards = fair_shards(variables, len(loads.owners))
        nodes = [self._node(variable, shards[variable.name], loads, bandwidths) for variable in ordered]
        return make_strategy("UnevenPartitionedPS", resource_spec, variables, nodes)

    def _node(
        self, variable: SyncedVariable, shards: int, loads: GreedyLoads, bandwidths: tuple[Fraction, ...]
    ) -> strategy_pb2.VariableNode:
        """The node of a variable; what its owners get is counted."""
        shards = min(self.max_shards or shards, len(loads.owners))
        even = even_cut(variable, 0, shards, self.min_partition_bytes)
        if even is None:
            return parameter_server_node(variable.name, loads.place(variable.byte_size), self)
        owners = sorted(loads.least_loaded(len(even.sizes)))
        cut = Partitioning(0, proportional_sizes(variable.shape[0], [bandwidths[owner] for owner in owners]))
        node = partitioned_node(variable.name, cut, [self.parameter_server(owner) for owner in owners])
        for owner, shard in zip(owners, shards_of(variable, cut), strict=True):
            loads.add(owner, shard.byte_size)
        return node
