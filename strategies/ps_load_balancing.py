"""PSLoadBalancing: balances the bytes of variables over owners, and partitions variables too large for one owner.

The functions after the class do the same for other builders.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autodist.placement.partitioning import Partitioning
from autodist.proto import strategy_pb2
from autodist.resources import ResourceSpec
from autodist.strategies.base import StrategyBuilder, make_strategy, workers_with_replicas
from autodist.strategies.loads import GreedyLoads, usual_owners
from autodist.strategies.nodes import node_of
from autodist.strategies.partitioning import PartitionOptions, shards_of
from autodist.strategies.ps import ServerOptions
from autodist.strategies.registry import register
from autodist.strategies.variables import GraphLike, SyncedVariable, synced_variables


@register
@dataclass(frozen=True)
class PSLoadBalancing(ServerOptions, PartitionOptions, StrategyBuilder):
    """Parameter servers on all workers: variables are assigned by bytes, weighted by the owners' bandwidths.

    For models with large sparse variables, for machines with links of unequal speed, and for optimizers with much
    state: it is distributed over the workers. If there are workers without replicas, only these own variables.

    Each variable has one owner. From four workers on, sparse variables and those larger than b/W are partitioned (see
    `partition_heavy_variables`). PartitionedPS partitions all variables that are large enough.

    Cost: with W equal workers and b bytes of dense gradients, each worker owns about b/W. It sends about
    2·b·(W-1)/W bytes a step, half as a worker and half as an owner, and receives as many.

    Source: the greedy rule of R. L. Graham, "Bounds on Multiprocessing Timing Anomalies", SIAM J. Appl. Math.
    17(2), 1969, largest first; for the partitioning S. Kim et al., see Parallax.

    Attributes:
        max_shards, min_partition_bytes: see PartitionOptions. If `max_shards` is set, variables are partitioned on any
            number of workers; 1 disables partitioning.
        sync, staleness, local_proxy_variable: see ServerOptions.
    """

    def build(self, graph_item: GraphLike, resource_spec: ResourceSpec) -> strategy_pb2.Strategy:
        variables = synced_variables(graph_item)
        partitionings = partition_heavy_variables(variables, resource_spec, self)
        nodes = balanced_server_nodes(variables, partitionings, resource_spec, self)
        return make_strategy("PSLoadBalancing", resource_spec, variables, nodes)


UNPARTITIONED_WORKERS = 3
"""The largest number of workers without partitioning: an owner serves at most two others, so shards save nothing."""


def balanced_server_nodes(
    variables: Sequence[SyncedVariable],
    partitionings: Mapping[str, Partitioning | None],
    resource_spec: ResourceSpec,
    options: ServerOptions,
) -> list[strategy_pb2.VariableNode]:
    """Returns a parameter-server node for each variable, with owners of its shards chosen by `GreedyLoads`.

    Args:
        variables: the variables to place on parameter servers.
        partitionings: the partitionings by the variables' names; None or a missing name: the variable stays whole.
        resource_spec: the machines.
        options: the options of the servers.
    """
    owners = GreedyLoads(resource_spec).place_pieces(
        {
            (variable.name, index): shard.byte_size
            for variable in variables
            for index, shard in enumerate(shards_of(variable, partitionings.get(variable.name)))
        }
    )
    servers: dict[str, list[strategy_pb2.ParameterServer]] = {variable.name: [] for variable in variables}
    sent_whole = {variable.name for variable in variables if variable.is_sent_whole}
    for (name, _), owner in sorted(owners.items()):
        servers[name].append(options.parameter_server(owner, name in sent_whole))
    return [node_of(name, partitionings.get(name), servers[name]) for name in servers]


served_nodes = balanced_server_nodes  # its former name, which builders of scripts may import


def partition_heavy_variables(
    variables: Sequence[SyncedVariable], resource_spec: ResourceSpec, options: PartitionOptions
) -> dict[str, Partitioning]:
    """Partitions variables that one owner should not serve: tables, and those larger than an owner's fair share.

    Each worker requests rows of a table from its owner, so the bytes that the owner sends grow with the number of
    workers, whatever the size of the table. Partitioning begins with four workers. If `max_shards` is set, it applies
    to any number of workers; 1 disables it.

    Args:
        variables: the variables to place on parameter servers.
        resource_spec: the machines.
        options: the minimum size of partitioned variables, and the maximum number of shards.
    """
    if options.max_shards is None and len(workers_with_replicas(resource_spec)) <= UNPARTITIONED_WORKERS:
        return {}
    owners, total = len(usual_owners(resource_spec)), sum(variable.byte_size for variable in variables)
    heavy = {v.name for v in variables if v.is_sparse or v.byte_size * owners > total}
    partitionings = options.partitionings(variables, owners).items()
    return {name: partitioning for name, partitioning in partitionings if partitioning is not None and name in heavy}
