"""The types of what a node takes and gives, as its op and its attributes say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import tensorflow as tf
from tensorflow.python.framework import op_def_registry  # the only way from an op's name to its definition

from autodist.graph.index import GraphIndex
from autodist.graph.names import node_of, output_index

NodeDef: TypeAlias = tf.compat.v1.NodeDef

RESOURCE, VARIANT = (t.as_datatype_enum for t in (tf.resource, tf.variant))
"""A resource may be a variable's handle; a variant may be a list of tensors."""


def is_stateless(op: str) -> bool:
    """Whether an op is known, and TensorFlow says that it has no state: that its outputs are all that it does."""
    definition = op_def_registry.get(op)
    return definition is not None and not definition.is_stateful


def is_in_batches(node: NodeDef) -> bool:
    """Whether a gather looks up in another operand for each of the first axes.

    To ask a node's attributes for one that it lacks would give it one without a value.
    """
    return "batch_dims" in node.attr and node.attr["batch_dims"].i != 0


def input_names(op: str) -> list[str]:
    """What TensorFlow calls the inputs of an op, in their order."""
    return [argument.name for argument in op_def_registry.get(op).input_arg]


def types_of_inputs(node: NodeDef) -> Iterator[int]:
    """The types of a node's data inputs, in their order."""
    for argument in op_def_registry.get(node.op).input_arg:
        yield from _types(node, argument)


def types_of_outputs(node: NodeDef) -> Iterator[int]:
    """The types of a node's outputs, in their order."""
    for argument in op_def_registry.get(node.op).output_arg:
        yield from _types(node, argument)


def type_of(graph_index: GraphIndex, name: str) -> int:
    """The type of a tensor of a graph; its node's op may be a function of the graph's."""
    node = graph_index.nodes[node_of(name)]
    functions = (f.signature for f in graph_index.graph_def.library.function if f.signature.name == node.op)
    made = op_def_registry.get(node.op) or next(functions)
    types = [kind for argument in made.output_arg for kind in _types(node, argument)]
    return types[output_index(name)]


def spelled_outputs(node: NodeDef) -> list[str]:
    """How a function's nodes spell the outputs of a node among them, without its name: "output:0", …"""
    found = []
    for argument in op_def_registry.get(node.op).output_arg:
        found += [f"{argument.name}:{k}" for k, _ in enumerate(_types(node, argument))]
    return found


def _types(node: NodeDef, argument: Any) -> list[int]:
    if argument.type_list_attr:
        return list(node.attr[argument.type_list_attr].list.type)
    kind = argument.type or node.attr[argument.type_attr].type
    return [kind] * (node.attr[argument.number_attr].i if argument.number_attr else 1)
