"""Numbers of rows of the sparse gradients of a step, for inputs of given lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tensorflow as tf

from autodist.graph.editor import GraphEditor
from autodist.graph.names import node_of
from autodist.graph.step import CapturedStep


def gradient_rows(step: CapturedStep, shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Returns the number of gradient rows of each sparse variable; omits those that depend on the data."""
    indices: dict[str, list[str]] = {}
    for gradient in step.gradients:
        if gradient.is_sparse:
            indices.setdefault(gradient.variable, []).append(gradient.tensors[0])
    if not indices:
        return {}
    definition = with_shapes(step, [name for names in indices.values() for name in names], shapes)
    with tf.Graph().as_default() as graph:
        tf.import_graph_def(definition, name="")
    result = {}
    for variable, names in indices.items():
        lengths = [graph.get_tensor_by_name(name).shape for name in names]
        if all(shape.rank == 1 and shape[0] is not None for shape in lengths):
            result[variable] = sum(int(shape[0]) for shape in lengths)
    return result


def with_shapes(
    step: CapturedStep, wanted: Sequence[str], shapes: Mapping[str, Sequence[int | None]]
) -> tf.compat.v1.GraphDef:
    """Returns the nodes that compute some tensors from inputs of these shapes; an import infers the other shapes."""
    editor = GraphEditor(step.graph_def, step.graph_index)
    editor.prune(wanted)
    for name, shape in shapes.items():
        if name in step.inputs and node_of(name) in editor and editor[node_of(name)].op == "Placeholder":
            editor[node_of(name)].attr["shape"].shape.CopyFrom(tf.TensorShape(shape).as_proto())
    definition = editor.to_graph_def()
    for node in definition.node:  # shapes inferred for an unknown batch size
        node.attr.pop("_output_shapes", None)
    return definition
