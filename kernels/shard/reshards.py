"""Reshard nodes: transfers between the places of a mesh, as stand-ins until they are lowered.

A stand-in is a TensorFlow op with the same static shapes as the transfer, so that later kernels copy it and follow the
batch through it. Its attribute holds the transfer.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import tensorflow as tf

from autodist.graph.editor import GraphEditor, NodeDef
from autodist.graph.names import as_input, node_of, tensor
from autodist.graph.recomputation import RESHARD


class ReshardKind(enum.Enum):
    """Kinds of transfers among the places of a row."""

    SLICE = "slice"  # of a whole tensor; nothing is sent
    ALL_GATHER = "all_gather"
    ALL_REDUCE = "all_reduce"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"  # divides `split` and gathers `dimension`
    INDEX = "index"  # the rank of the place in its row, an int64 scalar; nothing is sent


@dataclass(frozen=True)
class Reshard:
    """A transfer.

    Attributes:
        kind: of the transfer.
        axes: of the mesh, along which the places of its row differ, major first.
        dimension: the dimension that is divided or gathered.
        split: the dimension that an all-to-all divides.
        how: the reduction: "sum", "mean", "max" or "min".
    """

    kind: ReshardKind
    axes: tuple[str, ...]
    dimension: int = 0
    split: int = 0
    how: str = "sum"

    def to_text(self) -> str:
        """Returns the value of the attribute."""
        return json.dumps([self.kind.value, self.axes, self.dimension, self.split, self.how])

    @classmethod
    def of(cls, node: tf.compat.v1.NodeDef) -> Reshard | None:
        """Returns the transfer that a node stands for; None if it is no reshard node."""
        if RESHARD not in node.attr:
            return None
        kind, axes, dimension, split, how = json.loads(node.attr[RESHARD].s)
        return cls(ReshardKind(kind), tuple(axes), dimension, split, how)

    def __str__(self) -> str:
        at = "" if self.kind is ReshardKind.ALL_REDUCE else f" of dimension {self.dimension}"
        return f"{self.kind.value}{at} over {'·'.join(self.axes)}"


def add_reshard(editor: GraphEditor, name: str, source: str, spec: tf.TensorSpec, reshard: Reshard, parts: int) -> str:
    """Adds the stand-in of a transfer; returns the tensor that it makes.

    Args:
        editor: the editor.
        name: of the node.
        source: the tensor at each place.
        spec: its spec at each place.
        reshard: the transfer.
        parts: the number of places of the row.
    """
    dtype = spec.dtype
    if reshard.kind is ReshardKind.ALL_REDUCE:
        return _add(editor, name, "Identity", [source], dtype, reshard)
    if reshard.kind is ReshardKind.ALL_GATHER:
        return _add_tile(editor, name, source, dtype, reshard, _multiples(spec, reshard.dimension, parts))
    if reshard.kind is ReshardKind.ALL_TO_ALL:
        split = _add_split(editor, f"{name}/pieces", source, dtype, reshard.split, parts, None)
        return _add_tile(editor, name, split, dtype, reshard, _multiples(spec, reshard.dimension, parts))
    return _add_split(editor, name, source, dtype, reshard.dimension, parts, reshard)


def add_index(editor: GraphEditor, name: str, axes: tuple[str, ...]) -> str:
    """Adds the stand-in of the rank of a place in its row along some axes; returns the tensor, an int64 scalar."""
    _add_constant(editor, name, 0, tf.int64)
    editor[name].attr[RESHARD].s = Reshard(ReshardKind.INDEX, axes).to_text().encode()
    return f"{name}:0"


def source_of(name: str, nodes: GraphEditor | Mapping[str, NodeDef]) -> str:
    """Returns the tensor of a place that a stand-in made by `add_reshard` transfers."""
    node = nodes[name]
    if node.op == "Split":
        return tensor(node.input[1])
    reshard = Reshard.of(node)
    is_exchange = reshard is not None and reshard.kind is ReshardKind.ALL_TO_ALL
    return tensor(nodes[node_of(node.input[0])].input[1] if is_exchange else node.input[0])


def set_index(node: tf.compat.v1.NodeDef, index: int) -> None:
    """Replaces the stand-in of a rank by its value."""
    node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(index, tf.int64))
    del node.attr[RESHARD]


def _multiples(spec: tf.TensorSpec, dimension: int, parts: int) -> list[int]:
    return [parts if k == dimension else 1 for k in range(spec.shape.rank)]


def _add_tile(
    editor: GraphEditor, name: str, source: str, dtype: tf.DType, reshard: Reshard, multiples: Sequence[int]
) -> str:
    constant = _add_constant(editor, f"{name}/multiples", multiples)
    made = _add(editor, name, "Tile", [source, constant], dtype, reshard)
    editor[name].attr["Tmultiples"].type = tf.int32.as_datatype_enum
    return made


def _add_split(
    editor: GraphEditor, name: str, source: str, dtype: tf.DType, axis: int, parts: int, reshard: Reshard | None
) -> str:
    constant = _add_constant(editor, f"{name}/axis", axis)
    made = _add(editor, name, "Split", [constant, source], dtype, reshard)
    editor[name].attr["num_split"].i = parts
    return made


def _add(
    editor: GraphEditor, name: str, op: str, inputs: Sequence[str], dtype: tf.DType, reshard: Reshard | None
) -> str:
    node = NodeDef(name=name, op=op, input=map(as_input, inputs))
    node.attr["T"].type = dtype.as_datatype_enum
    if reshard is not None:
        node.attr[RESHARD].s = reshard.to_text().encode()
    return f"{editor.add(node)}:0"


def _add_constant(editor: GraphEditor, name: str, value: object, dtype: tf.DType = tf.int32) -> str:
    node = NodeDef(name=name, op="Const")
    node.attr["dtype"].type = dtype.as_datatype_enum
    node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value, dtype))
    return editor.add(node)
