"""Prevents fusions by TensorFlow that its servers then reject."""

from __future__ import annotations

from collections.abc import Iterable, MutableSequence

import tensorflow as tf

from autodist.graph.names import is_control, tensor

_BFLOAT16 = tf.bfloat16.as_datatype_enum

_APART = "/apart"
"""Suffix of the name of the node inserted between a convolution and its readers."""


def keep_apart(graph_def: tf.compat.v1.GraphDef) -> tf.compat.v1.GraphDef:
    """Returns the graph with nodes that keep TensorFlow from fusing convolutions to ops that a server rejects.

    On CPUs with oneDNN, TensorFlow fuses a bfloat16 convolution with its bias to `_FusedConv2D`, and then to an op of
    oneDNN. A server validates its part of the graph between the two, and `_FusedConv2D` is not registered for bfloat16.
    A node without cost, which the optimizer does not look through, is inserted after each convolution:

        Conv2D → BiasAdd        becomes        Conv2D → PlaceholderWithDefault → BiasAdd
    """
    bodies = [function.node_def for function in graph_def.library.function]
    if not any(map(_is_fused, (node for nodes in (graph_def.node, *bodies) for node in nodes))):
        return graph_def
    result = tf.compat.v1.GraphDef()
    result.CopyFrom(graph_def)
    _insert(result.node, "")
    for function in result.library.function:
        inserted = _insert(function.node_def, ":output")
        for name, source in function.ret.items():
            function.ret[name] = inserted.get(source, source)
    return result


def _is_fused(node: tf.compat.v1.NodeDef) -> bool:
    return node.op == "Conv2D" and node.attr["T"].type == _BFLOAT16


def _insert(nodes: MutableSequence[tf.compat.v1.NodeDef], output: str) -> dict[str, str]:
    """Inserts the nodes and redirects readers to them; returns the new tensors' names by the tensors they replace."""
    fused = [node for node in nodes if _is_fused(node)]
    inserted = {f"{node.name}{output}:0": f"{node.name}{_APART}{output}:0" for node in fused}
    for node in nodes:
        node.input[:] = _redirect(node.input, inserted)
    for node in fused:
        copy = tf.compat.v1.NodeDef(name=f"{node.name}{_APART}", op="PlaceholderWithDefault", device=node.device)
        copy.input.append(f"{node.name}{output}:0")
        copy.attr["dtype"].type = _BFLOAT16
        copy.attr["shape"].shape.unknown_rank = True
        nodes.append(copy)
    return inserted


def _redirect(inputs: Iterable[str], inserted: dict[str, str]) -> list[str]:
    return [i if is_control(i) else inserted.get(tensor(i), i) for i in inputs]
