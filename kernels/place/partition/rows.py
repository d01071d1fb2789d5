"""Partitioning rules for the ops of an update that process the rows of a sparse gradient: one copy for each shard."""

from __future__ import annotations

import tensorflow as tf

from autodist.graph.editor import NodeDef
from autodist.graph.names import data_inputs, node_of, output_index
from autodist.graph.op_types import is_in_batches
from autodist.graph.ops import Trait, having
from autodist.kernels.place.partition.arithmetic import on_pieces
from autodist.kernels.place.partition.layouts import Alike, Along, Layout, Places, Routed, RowIds
from autodist.kernels.place.partition.work import Work


def passed_on(work: Work, node: NodeDef) -> bool:
    """Partitions an op that forwards its only input."""
    name, out = data_inputs(node)[0], f"{node.name}:0"
    layout = work.layout(name)
    if layout is None:
        return False
    copies = work.clones(node, [[piece] for piece in work.pieces(name)])
    work.register(out, layout, [f"{copy}:0" for copy in copies])
    work.order_after(node.name, copies)
    return True


def unique(work: Work, node: NodeDef) -> bool:
    """Partitions `Unique` into one for the ids of each shard; equal ids belong to the same shard."""
    ids, *more = data_inputs(node)
    layout, unique_ids = work.layout(ids), f"{node.name}:0"
    if isinstance(layout, RowIds):
        layouts: tuple[Layout, Layout] = (RowIds(unique_ids, layout.cut), Places(layout.key, unique_ids))
    elif isinstance(layout, Alike):
        layouts = (layout, layout)
    else:
        return False
    copies = work.clones(node, [[piece, *more] for piece in work.pieces(ids)])
    for index in (0, 1):
        work.register(f"{node.name}:{index}", layouts[index], [f"{copy}:{index}" for copy in copies])
    work.order_after(node.name, copies)
    return True


def segment_sum(work: Work, node: NodeDef) -> bool:
    """Partitions a segment sum of rows.

    The segments are either the rows of the variable (by id) or the unique ids (by position among them).
    """
    rows, ids, segments = data_inputs(node)
    layout, by = work.layout(rows), work.layout(ids)
    if isinstance(layout, Along):
        rank = work.rank(ids)
        return rank is not None and layout.cut.axis >= rank and on_pieces(work, node)
    if not isinstance(layout, Routed):
        return False
    length = work.constant(segments)
    if isinstance(by, RowIds) and by.key == layout.key and length == sum(by.cut.sizes):
        counts = _constants(work, by.cut.sizes)
        result: Along | Routed = Along(by.cut)
    elif isinstance(by, Places) and by.key == layout.key and _counts(work, node, by.of):
        counts = _sizes(work, by.of)
        result = Routed(by.of)
    else:
        return False
    pieces = zip(work.pieces(rows), work.pieces(ids), counts, strict=True)
    copies = work.clones(node, [list(inputs) for inputs in pieces])
    for copy in copies:
        work.editor[copy].attr["Tnumsegments"].type = tf.int32.as_datatype_enum
    work.register(f"{node.name}:0", result, copies)
    work.order_after(node.name, copies)
    return True


def _counts(work: Work, node: NodeDef, ids: str) -> bool:
    """Returns True if the number of segments is exactly the number of `ids`."""
    name = data_inputs(node)[2]
    for _ in range(4):
        source = work.editor[node_of(name)]
        if source.op in having(Trait.LENGTHS):
            return data_inputs(source)[output_index(name)] == ids
        if source.op != "StridedSlice" and source.op not in having(Trait.IDENTITY | Trait.CASTS):
            return False
        name = data_inputs(source)[0]
    return False


def _constants(work: Work, sizes: tuple[int, ...]) -> tuple[str, ...]:
    with work.subgraph("segments") as f:
        made = [tf.constant(size) for size in sizes]
    return tuple(map(f.name, made))


def _sizes(work: Work, ids: str) -> tuple[str, ...]:
    with work.subgraph("segments") as f:
        made = [tf.size(piece) for piece in f.inputs(work.pieces(ids))]
    return tuple(map(f.name, made))


def gather(work: Work, node: NodeDef) -> bool:
    """Partitions a gather from a tensor that is partitioned like the variable of the ids, or along another axis."""
    params, ids, axis = data_inputs(node)
    layout, by = work.layout(params), work.layout(ids)
    if work.constant(axis) != 0 or is_in_batches(node) or not isinstance(layout, Along):
        return False
    if layout.cut.axis > 0:
        return on_pieces(work, node)
    if not isinstance(by, RowIds) or by.cut != layout.cut:
        return False
    pairs = zip(work.pieces(params), work.pieces(ids), strict=True)
    copies = work.clones(node, [[piece, own, axis] for piece, own in pairs])
    work.register(f"{node.name}:0", Routed(by.key), copies)
    work.order_after(node.name, copies)
    return True
