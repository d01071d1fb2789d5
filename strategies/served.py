"""Builds the nodes of variables on parameter servers: partitionings and owners."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autodist.graph.placement import Partitioning
from autodist.proto import strategy_pb2
from autodist.resources import ResourceSpec
from autodist.strategies.base import workers_with_replicas
from autodist.strategies.cut import shards_of
from autodist.strategies.loads import GreedyLoads, usual_owners
from autodist.strategies.nodes import node_of
from autodist.strategies.partition_options import PartitionOptions, fair_shards
from autodist.strategies.server_options import ServerOptions
from autodist.strategies.variables import SyncedVariable

SERVED_WHOLE = 3
"""Up to this many workers an owner serves at most two others, and shards cost as many messages as they save."""


def served_nodes(
    variables: Sequence[SyncedVariable],
    cuts: Mapping[str, Partitioning | None],
    resource_spec: ResourceSpec,
    options: ServerOptions,
) -> list[strategy_pb2.VariableNode]:
    """Returns a parameter-server node for each variable, with owners of its shards chosen by `GreedyLoads`.

    Args:
        variables: on parameter servers.
        cuts: the partitionings; None: a variable stays whole.
        resource_spec: the machines.
        options: of the servers.
    """
    owners = GreedyLoads(resource_spec).place_pieces(
        {
            (variable.name, index): shard.byte_size
            for variable in variables
            for index, shard in enumerate(shards_of(variable, cuts.get(variable.name)))
        }
    )
    servers: dict[str, list[strategy_pb2.ParameterServer]] = {variable.name: [] for variable in variables}
    for (name, _), owner in sorted(owners.items()):
        servers[name].append(options.parameter_server(owner))
    return [node_of(name, cuts.get(name), servers[name]) for name in servers]


def cuts_where_one_owner_is_too_few(
    variables: Sequence[SyncedVariable], resource_spec: ResourceSpec, options: PartitionOptions
) -> dict[str, Partitioning]:
    """Partitions variables that one owner should not serve: tables, and those larger than an owner's fair share.

    The bytes that a table's owner sends grow with the number of workers, each of which requests rows, whatever the
    table's size; so tables are partitioned from four workers on. `max_shards` enables this for any number of workers,
    or disables it with 1.

    Args:
        variables: on parameter servers.
        resource_spec: the machines.
        options: the minimum size of partitioned variables, and the maximum number of shards.
    """
    if options.max_shards is None and len(workers_with_replicas(resource_spec)) <= SERVED_WHOLE:
        return {}
    owners, total = len(usual_owners(resource_spec)), sum(variable.byte_size for variable in variables)
    shards = fair_shards(variables, owners)
    large = [v for v in variables if v.is_sparse or v.byte_size * owners > total]
    found = {variable.name: options.cut(variable, 0, shards[variable.name]) for variable in large}
    return {name: cut for name, cut in found.items() if cut is not None}
