"""Shapes in the nodes of a place's program, which depend on the part that the place has."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from autodist.graph.editor import NodeDef
from autodist.graph.names import as_input, tensor
from autodist.graph.node_rules import NodeRule, Side
from autodist.graph.step import PlacedStep
from autodist.graph.step_editor import StepEditor
from autodist.kernels.shard.propagate import Axes
from autodist.sharding import Mesh

OF_DIAGONALS = ("MatrixDiagV2", "MatrixDiagV3")
"""Ops whose graphs TensorFlow accepts only if the length of the diagonals is known, or the numbers of rows are not."""


def divide_shape(node: NodeDef, mesh: Mesh, axes: Sequence[Axes]) -> None:
    """Makes an EnsureShape check the shape of a place's part."""
    lengths = tf.TensorShape(node.attr["shape"].shape)
    if lengths.rank is not None:
        node.attr["shape"].shape.CopyFrom(_of_part(lengths.as_list(), mesh, axes))


def list_squeezed(node: NodeDef, rule: NodeRule) -> None:
    """Makes a Squeeze without a list keep the dimensions of which a place has a part of length 1."""
    listed, operand = node.attr["squeeze_dims"].list, rule.operands[0]
    if rule.rule is not None and operand is not None and not listed.i:
        listed.i[:] = [k for k, length in enumerate(operand.lengths) if length == 1]


def ensure_shape(
    editor: StepEditor[PlacedStep],
    reader: str,
    name: str,
    dtype: tf.DType,
    side: Side,
    mesh: Mesh,
    axes: Sequence[Axes],
) -> str:
    """Returns an operand of a node with its static shape, which it loses if it is received from other workers."""
    node = NodeDef(name=f"autodist/shape_for/{reader}", op="EnsureShape", input=[as_input(name)])
    node.attr["shape"].shape.CopyFrom(_of_part(side.lengths, mesh, axes))
    node.attr["T"].type = dtype.as_datatype_enum
    return tensor(editor.add(node))


def _of_part(lengths: Sequence[int | None], mesh: Mesh, axes: Sequence[Axes]) -> tf.compat.v1.TensorShape:
    own = [n if n is None else n // mesh.count(a) for n, a in zip(lengths, axes, strict=True)]
    return tf.TensorShape(own).as_proto()
