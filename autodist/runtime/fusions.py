"""What TensorFlow fuses and servers then refuse."""

from __future__ import annotations

from itertools import chain

import tensorflow as tf

_BFLOAT16 = tf.bfloat16.as_datatype_enum


def may_fuse_convolutions(graph_def: tf.compat.v1.GraphDef) -> bool:
    """Whether workers of several can run what TensorFlow makes of a graph's convolutions.

    On CPUs with oneDNN it fuses one of bfloat16 with its bias to `_FusedConv2D`, and then to an op of oneDNN. A server
    checks its part of the graph between the two, and `_FusedConv2D` is not declared for bfloat16.
    """
    bodies = (function.node_def for function in graph_def.library.function)
    nodes = chain(graph_def.node, *bodies)
    return not any(node.op == "Conv2D" and node.attr["T"].type == _BFLOAT16 for node in nodes)
