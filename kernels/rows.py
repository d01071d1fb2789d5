"""Rows: sparse variables cost what the rows cost that a step touches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import tensorflow as tf

from autodist.graph.editor import GraphEditor, NodeDef
from autodist.graph.fragment import fragment
from autodist.graph.item import GraphItem
from autodist.graph.names import node_of
from autodist.kernels.base import Context, Kernel


@dataclass(frozen=True)
class GatherRows(Kernel):
    """A gather of a read becomes a gather in the variable, and the shape of a read the variable's shape.

    A variable with sparse updates is read by copying all of it, so this pays on one device already; a parameter server
    then sends rows, not tables.

        ReadVariableOp(v) → GatherV2(·, ids)       becomes      ResourceGather(v, ids)
    """

    name: ClassVar[str] = "gather-rows"

    def apply(self, item: GraphItem, context: Context) -> GraphItem:
        editor = GraphEditor(item.graph_def)
        reads = [node.name for node in editor if node.op == "ReadVariableOp"]
        changed = False
        for name in reads:
            for consumer in editor.consumers(name):
                node = editor[consumer]
                if node.op == "GatherV2" and _gathers_rows_of(editor, node, name):
                    _gather_in_variable(editor, node, editor[name])
                    changed = True
                elif node.op == "Shape":
                    _shape_of_variable(editor, node, editor[name])
                    changed = True
        return replace(item, graph_def=editor.to_graph_def()) if changed else item


def _gathers_rows_of(editor: GraphEditor, node: NodeDef, read: str) -> bool:
    if node_of(node.input[0]) != read or node_of(node.input[1]) == read or node.attr["batch_dims"].i:
        return False
    axis = editor[node_of(node.input[2])]
    return axis.op == "Const" and int(tf.make_ndarray(axis.attr["value"].tensor)) == 0


def _gather_in_variable(editor: GraphEditor, node: NodeDef, read: NodeDef) -> None:
    dtype = node.attr["Tparams"].type
    inputs = [read.input[0], node.input[1], *node.input[3:], *read.input[1:]]
    node.op = "ResourceGather"
    for key in ("Tparams", "Taxis", "batch_dims", "_class"):
        node.attr.pop(key, None)
    node.attr["dtype"].type = dtype
    node.attr["validate_indices"].b = True
    editor.set_inputs(node.name, inputs)


def _shape_of_variable(editor: GraphEditor, node: NodeDef, read: NodeDef) -> None:
    inputs = [read.input[0], *node.input[1:], *read.input[1:]]
    node.op = "VariableShape"
    node.attr.pop("T", None)
    node.attr.pop("_class", None)
    editor.set_inputs(node.name, inputs)


@dataclass(frozen=True)
class SumRepeatedRows(Kernel):
    """Rows that come more than once are summed in a fixed order right before they are added to a variable.

    A scatter of repeated rows runs on several threads and differs in its last bits from run to run, hence from worker
    to worker. A sum of segments does not.

        ResourceScatterAdd(v, ids, rows)    becomes    ResourceScatterAdd(v, unique ids, sum of rows of one id)
    """

    name: ClassVar[str] = "sum-repeated-rows"

    def apply(self, item: GraphItem, context: Context) -> GraphItem:
        scatters = [n.name for n in item.graph_def.node if n.op in ("ResourceScatterAdd", "ResourceScatterSub")]
        if context.is_alone or not scatters:
            return item
        editor = GraphEditor(item.graph_def)
        for name in scatters:
            _sum_repeats(editor, editor[name])
        return replace(item, graph_def=editor.to_graph_def())


def _sum_repeats(editor: GraphEditor, node: NodeDef) -> None:
    handle, ids, rows = node.input[:3]
    dtype = tf.as_dtype(node.attr["dtype"].type)
    ids_dtype = tf.as_dtype(node.attr["Tindices"].type)
    with fragment(editor, f"sum_repeated_rows/{node.name}") as f:
        unique, segment = tf.unique(f.input(ids, ids_dtype, [None]), out_idx=tf.int32)
        summed = tf.math.unsorted_segment_sum(f.input(rows, dtype), segment, tf.size(unique))
    editor.set_inputs(node.name, [handle, f.name(unique), f.name(summed), *node.input[3:]])

