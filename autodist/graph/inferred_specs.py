"""Inferred specs: shapes and dtypes of tensors that were not captured, inferred from those that were."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from autodist.graph.editor import GraphDef, NodeDef
from autodist.graph.imported import ImportedGraph
from autodist.graph.names import data_inputs, node_of
from autodist.graph.ops import Trait, having
from autodist.graph.subgraph import SpecOf

_OF_OTHER_GRAPH = ("_class", "_output_shapes")
"""Attributes that refer to other nodes or were inferred for another graph."""


_MORE_THAN_SPECS = having(Trait.SOURCE) - having(Trait.FED)
"""Ops that provide TensorFlow with more than a spec: a value, or the shape of a variable."""


def infer_specs(nodes: Mapping[str, NodeDef], library: Any, noted: SpecOf, name: str) -> tuple[tf.TensorSpec, ...]:
    """Infers the specs of the outputs of a node, as far as TensorFlow can.

    Args:
        nodes: of the graph, by name.
        library: the functions that they may call, a FunctionDefLibrary.
        noted: returns known specs; raises KeyError for other tensors.
        name: of the node.

    Raises:
        KeyError: the graph has no such node.
    """
    if name not in nodes:
        raise KeyError(f"{name} is not a node of the graph")
    definition = _leading_to(nodes, noted, name)
    definition.library.CopyFrom(library)
    graph = ImportedGraph()
    graph.import_nodes(definition)
    return tuple(tf.TensorSpec(made.shape, made.dtype) for made in graph.get_operation_by_name(name).outputs)


def _leading_to(nodes: Mapping[str, NodeDef], noted: SpecOf, name: str) -> GraphDef:
    """Returns the nodes that lead to a node, with placeholders for tensors whose specs are recorded."""
    definition = GraphDef(versions={"producer": tf.version.GRAPH_DEF_VERSION})
    front, seen = [name], {name}
    placeholders: dict[str, str] = {}
    while front:
        copy = definition.node.add()
        copy.CopyFrom(nodes[front.pop()])
        copy.device = ""
        for attribute in _OF_OTHER_GRAPH:
            copy.attr.pop(attribute, None)
        inputs = data_inputs(copy)
        for source in dict.fromkeys(inputs):
            node = nodes[node_of(source)]
            spec = None if node.op in _MORE_THAN_SPECS else _spec_if_noted(noted, source)
            if spec is not None and source not in placeholders:
                placeholders[source] = _add_placeholder(definition, f"noted_{len(placeholders)}", spec)
            elif spec is None and node.name not in seen:
                seen.add(node.name)
                front.append(node.name)
        copy.input[:] = [placeholders.get(source, source) for source in inputs]
    return definition


def _spec_if_noted(noted: SpecOf, name: str) -> tf.TensorSpec | None:
    try:
        return noted(name)
    except KeyError:
        return None


def _add_placeholder(definition: GraphDef, name: str, spec: tf.TensorSpec) -> str:
    node = definition.node.add(name=name, op="Placeholder")
    node.attr["dtype"].type = spec.dtype.as_datatype_enum
    node.attr["shape"].shape.CopyFrom(spec.shape.as_proto())
    return name
