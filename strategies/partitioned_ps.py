"""PartitionedPS: partitions large variables and balances the bytes of shards over their owners."""

from __future__ import annotations

from dataclasses import dataclass

from autodist.proto import strategy_pb2
from autodist.resources import ResourceSpec
from autodist.strategies.base import StrategyBuilder, make_strategy
from autodist.strategies.loads import usual_owners
from autodist.strategies.partitioning import PartitionOptions
from autodist.strategies.ps import ServerOptions
from autodist.strategies.ps_load_balancing import balanced_server_nodes
from autodist.strategies.registry import register
from autodist.strategies.variables import GraphLike, synced_variables


@register
@dataclass(frozen=True)
class PartitionedPS(ServerOptions, PartitionOptions, StrategyBuilder):
    """Parameter servers with shards: large variables are partitioned along axis 0, and owners are balanced by bytes.

    For models with one variable, often an embedding, that is larger than a worker's fair share or its memory. If one
    worker owned it, all others would wait for the link of this worker.

    Cost: with W equal workers and b bytes of dense gradients, each worker owns b/W, up to one shard. It sends about
    2·b·(W-1)/W bytes a step, half as a worker and half as an owner, and receives as many. A row of a sparse variable
    is only sent between the worker that touches it and the owner of its shard.

    Source: M. Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014 (ranges of keys
    per server); the owners by the greedy rule of R. L. Graham, see PSLoadBalancing.

    Attributes:
        max_shards, min_partition_bytes: see PartitionOptions.
        sync, staleness, local_proxy_variable: see ServerOptions.
    """

    def build(self, graph_item: GraphLike, resource_spec: ResourceSpec) -> strategy_pb2.Strategy:
        variables = synced_variables(graph_item)
        partitionings = self.partitionings(variables, len(usual_owners(resource_spec)))
        nodes = balanced_server_nodes(variables, partitionings, resource_spec, self)
        return make_strategy("PartitionedPS", resource_spec, variables, nodes)
