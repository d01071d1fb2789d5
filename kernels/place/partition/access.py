"""Access to variables that are cut: which rule is for what takes a variable's handle."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace

import tensorflow as tf
from tensorflow.python.framework import op_def_registry

from autodist.errors import StrategyError
from autodist.graph.editor import NodeDef
from autodist.graph.names import tensor
from autodist.graph.op_types import is_in_batches
from autodist.graph.ops import Trait, having, writes_rows
from autodist.graph.parts import Variable
from autodist.graph.placement import WHOLE
from autodist.graph.subgraph import SubgraphBuilder
from autodist.kernels.place.copies import add_copy, read_before, take_copy
from autodist.kernels.place.partition.layouts import Along, Routed, RowIds
from autodist.kernels.place.partition.routes import gather_rows, route
from autodist.kernels.place.partition.work import PartitionedVariable, Work

Rule = Callable[[Work, NodeDef, PartitionedVariable], bool]


def access(work: Work, node: NodeDef) -> bool:
    """If a node takes the handle of a cut variable, rewrites it for the shards or the whole; returns whether it does.

    Raises:
        StrategyError: control flow of TensorFlow 1 writes such a variable.
    """
    cut = next((cut for name in work.data(node) if (cut := work.variable(name))), None)
    if cut is None:
        _require_no_write(work, node)
        return False
    if node.op != "Identity":  # what takes the handle from it is looked at by itself
        rule = _rule_of(node.op)
        if rule is None or not rule(work, node, cut):
            give_whole(work, node)
    return True


def _rule_of(op: str) -> Rule | None:
    if op in having(Trait.ASSIGNMENT):
        return write
    if op.startswith("ResourceApply") or writes_rows(op):
        return apply_by_shard
    return READS.get(op)


def _require_no_write(work: Work, node: NodeDef) -> None:
    """Behind an Enter or a Switch the whole is read; what is written there would be lost."""
    effect = work.effects.get(node.name)
    lost = effect.writes & work.variables.keys() if effect else frozenset()
    for handle in sorted(lost):
        raise StrategyError(
            f"{work.variables[handle].variable.name} is partitioned, and {node.op} ({node.name}) writes it inside a "
            "loop or a branch of TensorFlow 1's control flow, which is not done shard by shard. Leave the variable "
            "whole, or take the control flow of TensorFlow 2 (tf.compat.v1.enable_control_flow_v2())."
        )


def give_whole(work: Work, node: NodeDef) -> None:
    """Lets a node take variables that hold the whole, and gives the shards their parts of what it leaves there.

    loop(v)    becomes    v/whole ← concat(v/shard_0, v/shard_1);  loop(v/whole);  v/shard_k ← a part of v/whole
    """
    taken: dict[str, list[str]] = {}
    for name in work.data(node):
        cut = work.variable(name)
        if cut is not None:
            taken.setdefault(cut.variable.handle, []).append(name)
    effect, written = work.effects.get(node.name), []
    for handle, names in taken.items():
        cut = work.variables[handle]
        whole = _refreshed(work, node, cut, names)
        if effect and handle in effect.writes:
            written += _give_back(work, node, cut, whole)
    if written:
        work.order_after(node.name, [node.name, *written], by_shard=False)


def _refreshed(work: Work, node: NodeDef, cut: PartitionedVariable, taken: list[str]) -> Variable:
    """The variable that holds the whole, which `node` takes with the value that it finds."""
    variable = cut.variable
    whole = replace(variable, name=f"{variable.name}{WHOLE}", handle=f"{variable.handle}{WHOLE}")
    if whole.handle not in work.editor:
        work.copies.append(whole)
        add_copy(work.editor, variable, whole.handle, WHOLE)
    value = read_before(work.editor, node.name, variable, f"{whole.handle}/for/{node.name}")
    work.editor.note({tensor(value): tf.TensorSpec(whole.shape, whole.dtype)})
    asking = _asked_before(work, node, cut)
    if asking:
        _read_if_set(work, value, cut, asking)
    else:
        read(work, work.editor[value], cut)
    take_copy(work.editor, node.name, taken, whole.handle, value)
    return whole


def _asked_before(work: Work, node: NodeDef, cut: PartitionedVariable) -> list[str]:
    """What asks whether the variable is initialised, so that `node` reads it in a branch alone."""
    asking = [n for n in work.editor.consumers(cut.variable.handle) if work.editor[n].op == "VarIsInitializedOp"]
    return sorted(work.editor.ancestors([node.name]).intersection(asking)) if asking else []


def _read_if_set(work: Work, name: str, cut: PartitionedVariable, asking: list[str]) -> None:
    """Lets a read give zeros, which nothing looks at, where there is no value yet.

    It comes after the question: initialisers may set the variable at the same time, and where the answer is that it is
    set, what is read is its value.
    """
    waits = [*work.waits(work.editor[name]), *asking]

    def value(f: SubgraphBuilder, shard: Variable) -> tf.Tensor:
        handle = f.input(shard.handle, tf.resource)
        return tf.cond(
            tf.raw_ops.VarIsInitializedOp(resource=handle),
            lambda: tf.ensure_shape(tf.raw_ops.ReadVariableOp(resource=handle, dtype=shard.dtype), shard.shape),
            lambda: tf.zeros(shard.shape, shard.dtype),
        )

    def whole(f: SubgraphBuilder) -> tf.Tensor:
        with tf.control_dependencies([f.after(waits)]):
            return tf.concat([value(f, shard) for shard in cut.shards], cut.cut.axis)

    work.becomes(name, whole)


def _give_back(work: Work, node: NodeDef, cut: PartitionedVariable, whole: Variable) -> list[str]:
    """Writes what a node left in the whole to the shards; returns the writes."""
    work.written_whole[cut.variable.name] = f"{node.op} ({node.name})"
    work.tell(f"{cut.variable.name} is in shards, and is put together for {node.op} ({node.name}), which writes it")
    with work.subgraph("written") as f:
        with tf.control_dependencies([f.after([node.name])]):
            value = tf.raw_ops.ReadVariableOp(resource=f.input(whole.handle, tf.resource), dtype=whole.dtype)
        parts = tf.split(value, list(cut.cut.sizes), cut.cut.axis)
        writes = [
            tf.raw_ops.AssignVariableOp(resource=f.input(shard.handle, tf.resource), value=part)
            for shard, part in zip(cut.shards, parts, strict=True)
        ]
    return list(map(f.name, writes))


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
