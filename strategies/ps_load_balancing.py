"""PSLoadBalancing: balances the bytes of variables over owners, and partitions those too large for one owner."""

from __future__ import annotations

from dataclasses import dataclass

from autodist.proto import strategy_pb2
from autodist.resources import ResourceSpec
from autodist.strategies.base import StrategyBuilder, make_strategy
from autodist.strategies.partition_options import PartitionOptions
from autodist.strategies.registry import register
from autodist.strategies.served import cuts_where_one_owner_is_too_few, served_nodes
from autodist.strategies.server_options import ServerOptions
from autodist.strategies.variables import GraphLike, synced_variables


@register
@dataclass(frozen=True)
class PSLoadBalancing(ServerOptions, PartitionOptions, StrategyBuilder):
    """Parameter servers on all workers: variables are assigned by bytes, weighted by the owners' bandwidths.

    For models with large sparse variables, for machines with links of unequal speed, and for optimizers with much
    state, which is distributed over the workers. If there are nodes without replicas, only these own variables.

    Each variable has one owner, except sparse ones and those larger than b/W, which are partitioned from four workers
    on (see `cuts_where_one_owner_is_too_few`); PartitionedPS partitions all that are large enough.

    Cost: with W equal workers and b bytes of dense gradients, each worker owns about b/W. It sends about
    2·b·(W-1)/W bytes a step, half as a worker and half as an owner, and receives as many.

    Source: the greedy rule of R. L. Graham, "Bounds on Multiprocessing Timing Anomalies", SIAM J. Appl. Math.
    17(2), 1969, largest first; for the partitioning S. Kim et al., see Parallax.

    Attributes:
        max_shards, min_partition_bytes: of partitioned variables; see PartitionOptions. With `max_shards` they are
            partitioned on any number of workers, with 1 never.
        sync, staleness, local_proxy_variable: see ServerOptions.
    """

    def build(self, graph_item: GraphLike, resource_spec: ResourceSpec) -> strategy_pb2.Strategy:
        variables = synced_variables(graph_item)
        cuts = cuts_where_one_owner_is_too_few(variables, resource_spec, self)
        nodes = served_nodes(variables, cuts, resource_spec, self)
        return make_strategy("PSLoadBalancing", resource_spec, variables, nodes)
