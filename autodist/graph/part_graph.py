"""Builds a separate graph of some nodes of a step, so that they can run alone."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import tensorflow as tf

from autodist.errors import RewriteError
from autodist.graph.editor import drop_lost_colocation
from autodist.graph.index import GraphIndex
from autodist.graph.names import is_control, node_of, output_index, tensor
from autodist.graph.op_types import RESOURCE, VARIANT, type_of

PREFIX = "autodist/taken/"
"""Prefix of the placeholders for the inputs of a part."""


@dataclass(frozen=True)
class PartGraph:
    """A part of a step as a graph.

        feeds = {graph.inputs[name]: values[name] for name in graph.inputs}
        values.update(zip(graph.outputs, session.run(graph.outputs, feeds)))

    Attributes:
        graph_def: the nodes, with unchanged names, and all functions of the step.
        inputs: maps each tensor that the part takes from other nodes to the placeholder for it, of its dtype and any
            shape.
        outputs: its outputs, by their names in the step.
        targets: further nodes to run.
    """

    graph_def: tf.compat.v1.GraphDef
    inputs: Mapping[str, str]
    outputs: tuple[str, ...]
    targets: tuple[str, ...]


def part_graph(
    graph_index: GraphIndex, nodes: Sequence[str], takes: Iterable[str], gives: Iterable[str], targets: Iterable[str]
) -> PartGraph:
    """Returns the graph of some nodes, with placeholders for their inputs; drops control inputs from other nodes.

    Raises:
        RewriteError: an input or output is a resource or a variant, which cannot be fed or fetched.
    """
    out = tf.compat.v1.GraphDef(versions=graph_index.graph_def.versions, library=graph_index.graph_def.library)
    inputs, outputs = {}, tuple(gives)
    for name in takes:
        made = out.node.add(name=f"{PREFIX}{node_of(name)}/{output_index(name)}", op="Placeholder")
        made.attr["dtype"].type = _type_of_value(graph_index, name)
        inputs[name] = tensor(made.name)
    for name in outputs:
        _type_of_value(graph_index, name)
    inside = frozenset(nodes)
    for name in nodes:
        node = out.node.add()
        node.CopyFrom(graph_index.nodes[name])
        if not inside.issuperset(graph_index.sources[name]):
            node.input[:] = _within(node.input[:], inside, inputs)
    drop_lost_colocation({node.name: node for node in out.node})
    return PartGraph(out, inputs, outputs, tuple(targets))


def _within(spelled: Iterable[str], inside: Collection[str], inputs: Mapping[str, str]) -> list[str]:
    mapped = (i if node_of(i) in inside else None if is_control(i) else inputs[tensor(i)] for i in spelled)
    return [i for i in mapped if i is not None]


def _type_of_value(graph_index: GraphIndex, name: str) -> int:
    kind = type_of(graph_index, name)
    if kind in (RESOURCE, VARIANT):
        raise RewriteError(
            f"{name} passes from one part of the step to another and is a {tf.as_dtype(kind).name}, not a value: "
            f"give {node_of(name)!r} the key of the nodes that read it, or copy it into each part."
        )
    return kind
