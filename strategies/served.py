"""Variables that parameter servers hold: which of them are cut, and who owns what."""

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
"""Up to so many workers an owner serves at most two others, and shards make as many messages as they spare it."""


def served_nodes(
    variables: Sequence[SyncedVariable],
    cuts: Mapping[str, Partitioning | None],
    resource_spec: ResourceSpec,
    options: ServerOptions,
) -> list[strategy_pb2.VariableNode]:
    """A parameter server's node for each variable, with an owner for each of its shards by `GreedyLoads`.

    Args:
        variables: that are served.
        cuts: of those that are cut; None: a variable stays whole.
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
    """Cuts along axis 0 of what no one owner should serve: tables, and whatever is larger than an owner's fair share.

    What a table's owner sends grows with the workers, each of which asks it for rows, whatever the table's own size; so
    tables are cut from four workers on. `max_shards` asks for the cut on any number of them, or for none by 1.

    Args:
        variables: that are served.
        resource_spec: the machines.
        options: which of the variables are large enough, and how many shards there may be.
    """
    if options.max_shards is None and len(workers_with_replicas(resource_spec)) <= SERVED_WHOLE:
        return {}
    owners, total = len(usual_owners(resource_spec)), sum(variable.byte_size for variable in variables)
    shards = fair_shards(variables, owners)
    large = [v for v in variables if v.is_sparse or v.byte_size * owners > total]
    found = {variable.name: options.cut(variable, 0, shards[variable.name]) for variable in large}
    return {name: cut for name, cut in found.items() if cut is not None}
