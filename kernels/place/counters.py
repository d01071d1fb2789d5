"""Counters: variables that say how many updates there were, and are written by none of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from autodist.graph.find_stages import find_stages
from autodist.graph.names import is_control, node_of, tensor
from autodist.graph.ops import Trait
from autodist.graph.parts import Aggregation
from autodist.graph.stages import Stages
from autodist.graph.step import Step
from autodist.graph.walks import reach

Nodes = Mapping[str, list[tuple[str, str]]]
"""By a node's name, the nodes and tensors that it has data from."""


def find_counters(item: Step) -> list[str]:
    """Names of the variables that every step writes alike, whatever its batch, and that belong to the updates.

    These read them (Adam's number of steps), or the script has declared that one replica's write is enough, as Keras
    does of an optimizer's `iterations`.
    """
    stages = find_stages(item)
    nodes: Nodes = {
        n.name: [(node_of(i), tensor(i)) for i in n.input if not is_control(i)] for n in item.graph_def.node
    }
    read = _read_by_updates(stages, nodes)
    written = _written_alike(item, stages, nodes)
    return [
        v.name for v in item.variables
        if v.handle in written and (v.handle in read or v.aggregation is Aggregation.ONLY_FIRST_REPLICA)
    ]  # fmt: skip


def _read_by_updates(stages: Stages, nodes: Nodes) -> set[str]:
    """Handles of what the updates read, beside gradients."""
    gradients = {t for g in stages.gradients for t in g.tensors}
    writes = [w for w in stages.writes if w in stages.update]
    found = _data_ancestors(nodes, writes, gradients)
    return {h for name in found if name in stages.effects for h in stages.effects[name].reads}


def _written_alike(item: Step, stages: Stages, nodes: Nodes) -> set[str]:
    """Handles of what the compute part writes with values that no batch and no random draw reaches."""
    batch = {node_of(name) for name, axis in item.inputs.items() if axis is not None}
    batch |= {node.name for node in item.graph_index.having(Trait.SEEDED)}
    by_handle: dict[str, list[str]] = {}
    for write in stages.state_writes:
        for handle in stages.effects[write].writes:
            by_handle.setdefault(handle, []).append(write)
    seeds = {v.handle for v in item.variables if v.is_seed}
    return {h for h, writes in by_handle.items() if h not in seeds and not batch & _data_ancestors(nodes, writes)}


def _data_ancestors(nodes: Nodes, roots: Iterable[str], without: Iterable[str] = ()) -> set[str]:
    """The roots and all that they are computed from, the tensors `without` left aside."""
    left = set(without)
    return reach(roots, lambda name: [source for source, made in nodes[name] if made not in left])
