"""The nodes with which a run starts: those that are there, and on a mesh only those that form whole rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence

from autodist.resources import Node, ResourceSpec
from autodist.strategies import BuildsStrategy, find_mesh


def nodes_to_leave_out(
    addresses: Collection[str], spec: ResourceSpec, builder: BuildsStrategy | None
) -> tuple[str, ...]:
    """Returns the nodes without which a run starts again; none if too few would remain.

    Args:
        addresses: the nodes that are not there.
        spec: the machines.
        builder: the strategy builder; its mesh may need whole rows, and so leave out more nodes.
    """
    if spec.is_given:
        return ()  # the scheduler starts the processes, and those that join a start are in it
    left = nodes_in_whole_rows([node for node in spec.nodes if node.address not in addresses], spec, builder)
    if not addresses or len(left) < (spec.min_nodes or len(spec.nodes)):
        return ()
    return tuple(node.address for node in spec.nodes if node not in left)


def nodes_in_whole_rows(nodes: Sequence[Node], spec: ResourceSpec, builder: BuildsStrategy | None) -> Sequence[Node]:
    """Returns the first of some nodes of a spec, as many as a run can have: on a mesh, those that form whole rows."""
    mesh = None if builder is None else find_mesh(builder)
    if mesh is None:
        return nodes
    devices: Counter[str] = Counter()
    for worker in spec.workers:
        devices[worker.node.address] += len(worker.devices)
    return nodes[: mesh.whole_rows([devices[node.address] for node in nodes])]


def processes_in_whole_rows(builder: BuildsStrategy) -> Callable[[Sequence[int]], int]:
    """Returns a function of the numbers of devices of processes: how many of the first ones a run can have."""
    mesh = find_mesh(builder)
    return len if mesh is None else mesh.whole_rows
