"""Layouts of the outputs of layers: Identity nodes that carry a sharding from the script to the captured step."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from autodist.errors import StrategyError
from autodist.sharding import Constraint, Origin, Sharding

_MARK = "_autodist_sharding"
"""Attribute of the nodes; TensorFlow ignores attributes with this first character, and copies of a node keep it."""


def constrained(tensor: tf.Tensor, constraint: Constraint) -> tf.Tensor:
    """Returns a tensor with a sharding, which its gradient has, too."""
    text = json.dumps([str(constraint.sharding), str(constraint.origin)])

    @tf.custom_gradient
    def constrain(x: tf.Tensor) -> tuple[tf.Tensor, Callable[..., tf.Tensor]]:
        return _marked(x, text), lambda upstream: _marked(tf.convert_to_tensor(upstream), text)

    made: tf.Tensor = constrain(tensor)
    return made


def constraints_in(definition: tf.compat.v1.GraphDef) -> dict[str, Constraint]:
    """Returns the sharding of each marked node of a graph.

    Raises:
        StrategyError: a function of the graph has a marked node.
    """
    for function in definition.library.function:
        for node in function.node_def:
            if _MARK in node.attr:
                constraint = _constraint(node)
                raise StrategyError(
                    f"An output has the layout {constraint.sharding} ({constraint.origin}) within the function "
                    f"{function.signature.name}, such as the body of a loop, and AutoDist does not support it there. "
                    "Remove the key or the call."
                )
    return {node.name: _constraint(node) for node in definition.node if _MARK in node.attr}


def _constraint(node: tf.compat.v1.NodeDef) -> Constraint:
    sharding, origin = json.loads(node.attr[_MARK].s)
    return Constraint(Sharding.parse(sharding), Origin(origin))


def _marked(x: tf.Tensor, text: str) -> tf.Tensor:
    graph: Any = tf.compat.v1.get_default_graph()
    with graph._attr_scope({_MARK: tf.compat.v1.AttrValue(s=text.encode())}):
        return tf.identity(x)
