"""Sharding marks: attributes of the nodes for which the script requests a sharding."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

import tensorflow as tf

from autodist.graph.index import GraphIndex
from autodist.sharding import Constraint, Origin, Sharding, ShardingGroup

SHARDING_MARK = "_autodist_sharding"
"""Attribute of an Identity node: the text form of its sharding, and the script's line."""

GROUP_MARK = "_autodist_sharding_group"
"""Attribute of Identity nodes: those with an equal value are sharded alike. It ends with the script's line."""


def mark(node: tf.Operation, sharding: Sharding, origin: str) -> None:
    """Requests a sharding for the result of an Identity node."""
    _set(node, SHARDING_MARK, json.dumps([str(sharding), origin]))


def mark_group(node: tf.Operation, group: str, origin: str) -> None:
    """Adds the result of an Identity node to a group of tensors that are sharded alike."""
    _set(node, GROUP_MARK, json.dumps([group, origin]))


def _set(node: tf.Operation, name: str, text: str) -> None:
    node._set_attr(name, tf.compat.v1.AttrValue(s=text.encode()))


def constraints_of(graph_index: GraphIndex) -> dict[str, Constraint]:
    """Returns the requested shardings of a graph, by node."""
    return {
        name: Constraint(Sharding.parse(sharding), Origin(origin))
        for name, (sharding, origin) in _marked(graph_index, SHARDING_MARK).items()
    }


def groups_of(graph_index: GraphIndex) -> Iterator[ShardingGroup]:
    """Yields the sharding groups of a graph."""
    members: dict[str, list[str]] = {}
    origins: dict[str, str] = {}
    for name, (group, origin) in _marked(graph_index, GROUP_MARK).items():
        members.setdefault(group, []).append(f"{name}:0")
        origins[group] = origin
    for group, names in members.items():
        yield ShardingGroup(tuple(names), (Origin(origins[group]),))


def _marked(graph_index: GraphIndex, attribute: str) -> Mapping[str, tuple[str, str]]:
    nodes = graph_index.of_op("Identity")
    return {node.name: tuple(json.loads(node.attr[attribute].s)) for node in nodes if attribute in node.attr}
