"""Dtypes of the inputs and outputs of nodes, from their ops and attributes."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, TypeAlias

import tensorflow as tf
from tensorflow.python.framework import op_def_registry  # the only API that returns the definition of an op

from autodist.graph.index import GraphIndex
from autodist.graph.names import node_of, output_index
from autodist.graph.ops import draws_numbers

NodeDef: TypeAlias = tf.compat.v1.NodeDef

RESOURCE, VARIANT = (t.as_datatype_enum for t in (tf.resource, tf.variant))
"""A resource may be a variable's handle; a variant may be a list of tensors."""


def is_stateless(op: str) -> bool:
    """Returns True if an op is known and, according to TensorFlow, stateless: its outputs are its only effect."""
    definition = op_def_registry.get(op)
    return definition is not None and not definition.is_stateful


def is_function_of_inputs(op: str) -> bool:
    """Returns True if equal inputs of an op give equal outputs: it is stateless and draws no numbers."""
    return is_stateless(op) and not draws_numbers(op)


def is_in_batches(node: NodeDef) -> bool:
    """Returns True if a gather has batch dimensions.

    Reading a missing attribute of a node would add it without a value.
    """
    return "batch_dims" in node.attr and node.attr["batch_dims"].i != 0


@functools.cache
def type_attribute(op: str) -> str:
    """Returns the attribute of an op with a single type, that of its elements: `T` or `dtype`."""
    [name] = (attribute.name for attribute in op_def_registry.get(op).attr if attribute.type == "type")
    return str(name)


def input_names(op: str) -> list[str]:
    """Returns TensorFlow's names of the inputs of an op, in order."""
    return [argument.name for argument in op_def_registry.get(op).input_arg]


def types_of_inputs(node: NodeDef) -> Iterator[int]:
    """Yields the dtypes of a node's data inputs, in order."""
    for argument in op_def_registry.get(node.op).input_arg:
        yield from _types(node, argument)


def types_of_outputs(node: NodeDef) -> Iterator[int]:
    """Yields the dtypes of a node's outputs, in order."""
    for argument in op_def_registry.get(node.op).output_arg:
        yield from _types(node, argument)


def type_of(graph_index: GraphIndex, name: str) -> int:
    """Returns the dtype of a tensor of a graph; its node may call a function of the graph."""
    node = graph_index.nodes[node_of(name)]
    functions = (f.signature for f in graph_index.graph_def.library.function if f.signature.name == node.op)
    made = op_def_registry.get(node.op) or next(functions)
    types = [kind for argument in made.output_arg for kind in _types(node, argument)]
    return types[output_index(name)]


def spelled_outputs(node: NodeDef) -> list[str]:
    """Returns the outputs of a node as other nodes of a function spell them, without its name: "output:0", …"""
    result = []
    for argument in op_def_registry.get(node.op).output_arg:
        result += [f"{argument.name}:{k}" for k, _ in enumerate(_types(node, argument))]
    return result


def _types(node: NodeDef, argument: Any) -> list[int]:
    if argument.type_list_attr:
        return list(node.attr[argument.type_list_attr].list.type)
    kind = argument.type or node.attr[argument.type_attr].type
    return [kind] * (node.attr[argument.number_attr].i if argument.number_attr else 1)
