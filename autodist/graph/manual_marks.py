"""Marks of manual regions: attributes of the nodes that a script wrote for a single place of a mesh."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from autodist.graph.index import GraphIndex
from autodist.sharding import Constraint, ManualCollective, ManualRegion, Origin, Sharding

REGION_MARK = "_autodist_manual"
"""Attribute of the nodes of a region: its name, its axes, and the script's line."""

INPUT_MARK = "_autodist_manual_input"
"""Attribute of the Identity nodes by which tensors enter a region: the text form of the sharding."""

OUTPUT_MARK = "_autodist_manual_output"
"""Attribute of the Identity nodes by which tensors leave a region: the text form of the sharding."""

COLLECTIVE_MARK = "_autodist_collective"
"""Attribute of Identity nodes: the kind, the shardings of operand and result, and the script's line."""


def mark_nodes(nodes: Iterable[tf.Operation], region: str, axes: Sequence[str], origin: str) -> None:
    """Makes nodes a part of a manual region."""
    for node in nodes:
        _set(node, REGION_MARK, [region, list(axes), origin])


def mark_end(node: tf.Operation, attribute: str, sharding: Sharding) -> None:
    """Makes an Identity node an input or an output of the region that it belongs to."""
    _set(node, attribute, str(sharding))


def mark_collective(node: tf.Operation, collective: ManualCollective) -> None:
    """Makes an Identity node a collective of the region that it belongs to."""
    operand = None if collective.operand is None else str(collective.operand)
    _set(
        node,
        COLLECTIVE_MARK,
        [collective.kind, operand, str(collective.result.sharding), collective.result.origin.text],
    )


def regions_of(graph_index: GraphIndex) -> dict[str, ManualRegion]:
    """Returns the manual regions of a graph, by name."""
    nodes = {
        name: json.loads(node.attr[REGION_MARK].s)
        for name, node in graph_index.nodes.items()
        if REGION_MARK in node.attr
    }
    made: dict[str, ManualRegion] = {}
    for region, axes, origin in nodes.values():
        if region not in made:
            made[region] = ManualRegion(tuple(axes), {}, {}, frozenset(), Origin(origin), {})
    found = {region: [name for name, own in nodes.items() if own[0] == region] for region in made}
    return {region: _region(graph_index, one, found[region]) for region, one in made.items()}


def _region(graph_index: GraphIndex, region: ManualRegion, names: Sequence[str]) -> ManualRegion:
    def ends(attribute: str) -> dict[str, Constraint]:
        found = {name: _get(graph_index, name, attribute) for name in names}
        return {
            name: Constraint(Sharding.parse(text), region.origin) for name, text in found.items() if text is not None
        }

    inputs, outputs = ends(INPUT_MARK), ends(OUTPUT_MARK)
    collectives = {}
    for name in names:
        if (mark := _get(graph_index, name, COLLECTIVE_MARK)) is not None:
            kind, operand, result, origin = mark
            expected = None if operand is None else Sharding.parse(operand)
            collectives[name] = ManualCollective(kind, expected, Constraint(Sharding.parse(result), Origin(origin)))
    gradients = [name for name, one in collectives.items() if not one.kind]
    body = frozenset(names).difference(inputs, outputs, gradients)
    return ManualRegion(region.axes, inputs, outputs, body, region.origin, collectives)


def _set(node: tf.Operation, name: str, value: object) -> None:
    node._set_attr(name, tf.compat.v1.AttrValue(s=json.dumps(value).encode()))


def _get(graph_index: GraphIndex, name: str, attribute: str) -> Any:
    """Returns the value of a mark; None if a node has none."""
    node = graph_index.nodes[name]
    return json.loads(node.attr[attribute].s) if attribute in node.attr else None
