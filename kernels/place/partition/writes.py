"""Writes of variables that are cut: each shard gets its part of the value, or the rows that it holds."""

from __future__ import annotations

import tensorflow as tf
from tensorflow.python.framework import op_def_registry

from autodist.graph.editor import NodeDef
from autodist.kernels.place.partition.layouts import Routed, RowIds
from autodist.kernels.place.partition.routes import route
from autodist.kernels.place.partition.work import PartitionedVariable, Work

_VALUES = ("grad", "delta", "updates")
"""Inputs of the ops that update variables which have the variable's shape, or are rows of it."""


def write(work: Work, node: NodeDef, cut: PartitionedVariable) -> bool:
    values = work.along(work.data(node)[1], cut.cut)
    copies = work.clones(node, [[shard.handle, value] for shard, value in zip(cut.shards, values, strict=True)])
    work.order_after(node.name, copies, removed=True)
    return True


def apply_by_shard(work: Work, node: NodeDef, cut: PartitionedVariable) -> bool:
    """An op that updates a variable and its slots: `ResourceApplyAdam`, `ResourceSparseApplyAdagrad`, scatters of rows.

    A slot that serves others too is not cut alike, and elements are not told by their rows: then it is not done here.
    """
    if node.op.startswith("ResourceScatterNd"):
        return False
    names = [argument.name for argument in op_def_registry.get(node.op).input_arg]
    inputs = dict(zip(names, work.data(node), strict=True))
    variables = {name: work.variable(i) for name, i in inputs.items() if work.spec(i).dtype == tf.resource}
    if any(other is None or other.cut != cut.cut for other in variables.values()):
        return False
    values = {name: i for name, i in inputs.items() if name in _VALUES and work.rank(i) != 0}
    taken = {name: [i] * len(cut.shards) for name, i in inputs.items()}
    taken |= {name: [shard.handle for shard in other.shards] for name, other in variables.items() if other}
    if "indices" in inputs:
        taken |= _rows_by_shard(work, inputs["indices"], values, cut)
    else:
        taken |= {name: list(work.along(i, cut.cut)) for name, i in values.items()}
    copies = work.clones(node, [list(own) for own in zip(*taken.values(), strict=True)])
    work.order_after(node.name, copies, removed=True)
    return True


def _rows_by_shard(work: Work, ids: str, rows: dict[str, str], cut: PartitionedVariable) -> dict[str, list[str]]:
    """For "indices" and each of `rows`, what each shard's copy of an op that writes rows takes."""
    if cut.cut.axis > 0:
        parts = {name: list(work.along(i, cut.within_rows(work.rank(i)))) for name, i in rows.items()}
        return {"indices": list(work.alike(ids, len(cut.shards))), **parts}
    layout = work.layout(ids)
    if isinstance(layout, RowIds) and layout.cut == cut.cut:
        if all(work.layout(i) == Routed(layout.key) for i in rows.values()):
            return {"indices": list(work.pieces(ids)), **{name: list(work.pieces(i)) for name, i in rows.items()}}
    brought = route(work, ids, cut.cut, list(rows.values()))
    return {"indices": list(brought.ids), **{name: list(own) for name, own in zip(rows, brought.rows, strict=True)}}
