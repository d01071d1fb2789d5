"""Variables and slots that the data axis of a mesh divides: each place of a row holds a slice of its part."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from autodist.logs.formatting import listed
from autodist.options.fields import OptionError
from autodist.placement.partitioning import Partitioning, even_sizes
from autodist.proto import strategy_pb2
from autodist.sharding import Mesh, Sharding
from autodist.strategies.fsdp import WITHOUT_COPIES, layers_of_use
from autodist.strategies.nodes import node_of, partitioned_node
from autodist.strategies.ps import ServerOptions
from autodist.strategies.sharded_all_reduce import nearly_even_axis
from autodist.strategies.variables import GraphLike, SyncedVariable, synced_variables

WITH_COPIES = ServerOptions(local_proxy_variable=True)


def nodes_in_slices(
    step: GraphLike, shardings: Mapping[str, Sharding], data: str, owners: Sequence[int]
) -> dict[str, strategy_pb2.VariableNode]:
    """Returns the nodes of the trained variables that the data axis divides, by name.

    The parameters of a layer are gathered shortly before the layer computes, as by the builder `FSDP`. A variable has
    at most as many slices as elements along the dimension; their lengths differ by one at most.

    Args:
        step: the captured step.
        shardings: of variables, by name.
        data: the data axis.
        owners: the coordinates of the owners along the data axis.
    """
    found: dict[str, tuple[SyncedVariable, int]] = {}
    for variable in synced_variables(step):
        axes = shardings[variable.name].axes if variable.name in shardings else ()
        along = next((k for k, names in enumerate(axes) if data in names), None)
        if along is not None:
            found[variable.name] = variable, along
    layers = layers_of_use(step, [variable for variable, _ in found.values()])
    nodes = {}
    for name, (variable, along) in found.items():
        sizes = even_sizes(variable.shape[along], len(owners))
        servers = [WITHOUT_COPIES.parameter_server(owner) for owner, _ in zip(owners, sizes, strict=False)]
        for server in servers:
            server.layer = layers[name]
        nodes[name] = node_of(name, Partitioning(along, sizes) if len(sizes) > 1 else None, servers)
    return nodes


def nodes_with_slots_in_slices(
    step: GraphLike, names: Collection[str], owners: Sequence[int]
) -> dict[str, strategy_pb2.VariableNode]:
    """Returns the nodes of the trained variables whose slots the data axis divides, by name.

    As by the builder `ShardedAllReduce`, each owner in a row updates a slice of the row's part, and sends it to the
    others, which have the whole part. A variable of one element has no slices: its gradient is summed by all-reduce.

    Args:
        step: the captured step.
        names: of the variables.
        owners: the coordinates of the owners along the data axis.
    """
    nodes = {}
    for variable in synced_variables(step) if len(owners) > 1 else ():
        if variable.name in names and variable.elements > 1:
            axis = 0 if variable.is_sparse and variable.shape[0] > 1 else nearly_even_axis(variable, len(owners))
            sizes = even_sizes(variable.shape[axis], len(owners))
            servers = [WITH_COPIES.parameter_server(owner) for owner, _ in zip(owners, sizes, strict=False)]
            nodes[variable.name] = partitioned_node(variable.name, Partitioning(axis, sizes), servers)
    return nodes


def owners_in_rows(mesh: Mesh, workers: Sequence[int], data: str) -> list[int]:
    """Returns the coordinates along the data axis at which each row of a mesh has another worker.

    Raises:
        OptionError: the workers of two rows have different numbers of places.
    """
    rows = dict.fromkeys(mesh.row(place, [data]) for place in range(mesh.size))
    firsts = {tuple(_firsts([workers[place] for place in row])) for row in rows}
    if len(firsts) > 1:
        raise OptionError(
            "mesh",
            f"the axis {data!r} divides variables or slots, but the workers of the mesh {mesh} have different numbers "
            f"of devices along it, at the coordinates {listed(str(list(one)) for one in sorted(firsts))}. Start "
            "workers with equal numbers of devices.",
        )
    return list(firsts.pop())


def _firsts(workers: Sequence[int]) -> list[int]:
    """Returns the position of each worker that differs from those before it."""
    return [k for k, worker in enumerate(workers) if worker not in workers[:k]]
