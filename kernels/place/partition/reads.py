"""Reads and gathers of variables that are cut."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import tensorflow as tf

from autodist.graph.editor import NodeDef
from autodist.graph.names import tensor
from autodist.graph.op_types import is_in_batches
from autodist.kernels.place.partition.layouts import Along, Routed, RowIds
from autodist.kernels.place.partition.routes import gather_rows, route
from autodist.kernels.place.partition.work import PartitionedVariable, Work


def read(work: Work, node: NodeDef, cut: PartitionedVariable) -> bool:
    """The whole value: those of the shards, one after the other."""
    copies = work.clones(node, [[shard.handle] for shard in cut.shards])
    _put_together(work, node, copies, Along(cut.cut))
    return True


def _put_together(work: Work, node: NodeDef, copies: tuple[str, ...], layout: Along | Routed) -> None:
    """Lets a node be the copies' outputs, one after the other."""
    out = tensor(node.name)
    axis = layout.cut.axis if isinstance(layout, Along) else 0
    work.know(out, layout, copies)
    work.order_after(node.name, copies)
    work.becomes(node.name, lambda f: tf.concat(f.inputs(work.pieces(out)), axis))


def _shape(work: Work, node: NodeDef, cut: PartitionedVariable) -> bool:
    dtype = tf.as_dtype(node.attr["out_type"].type)
    work.becomes(node.name, lambda f: tf.constant(cut.variable.shape, dtype))
    return True


def _is_initialized(work: Work, node: NodeDef, cut: PartitionedVariable) -> bool:
    copies = work.clones(node, [[shard.handle] for shard in cut.shards])
    work.order_after(node.name, copies)
    work.becomes(node.name, lambda f: tf.reduce_all(tf.stack(f.inputs(map(tensor, copies)))))
    return True


def _gather(work: Work, node: NodeDef, cut: PartitionedVariable) -> bool:
    """Rows of the shards that hold them."""
    if is_in_batches(node):
        return False
    ids = work.data(node)[1]
    if cut.cut.axis > 0:
        return _gather_parts_of_rows(work, node, cut, ids)
    by = work.layout(ids)
    if isinstance(by, RowIds) and by.cut == cut.cut:
        pairs = zip(cut.shards, work.pieces(ids), strict=True)
        _put_together(work, node, work.clones(node, [[shard.handle, own] for shard, own in pairs]), Routed(by.key))
        return True
    asked = route(work, ids, cut.cut)
    copies = work.clones(node, [[shard.handle, own] for shard, own in zip(cut.shards, asked.ids, strict=True)])
    for copy in copies:
        work.editor.note({tensor(copy): tf.TensorSpec([None, *cut.variable.shape[1:]], cut.variable.dtype)})
    work.order_after(node.name, copies)
    work.becomes(node.name, functools.partial(gather_rows, ids, asked, copies))
    return True


def _gather_parts_of_rows(work: Work, node: NodeDef, cut: PartitionedVariable, ids: str) -> bool:
    """Every shard has a part of each row."""
    rank = work.rank(tensor(node.name))
    if rank is None:
        return False
    pairs = zip(cut.shards, work.alike(ids, len(cut.shards)), strict=True)
    copies = work.clones(node, [[shard.handle, own] for shard, own in pairs])
    _put_together(work, node, copies, Along(cut.within_rows(rank)))
    return True


READS: Mapping[str, Callable[[Work, NodeDef, PartitionedVariable], bool]] = {
    "ReadVariableOp": read,
    "ResourceGather": _gather,
    "VariableShape": _shape,
    "VarIsInitializedOp": _is_initialized,
}
"""How the whole is asked for; what fits none of these gets a variable that holds the whole."""
