"""Access to partitioned variables: the rules for nodes that take a variable's handle."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace

import tensorflow as tf
from tensorflow.python.framework import op_def_registry

from autodist.errors import StrategyError
from autodist.graph.editor import NodeDef
from autodist.graph.names import data_inputs, tensor
from autodist.graph.op_types import is_in_batches
from autodist.graph.ops import Trait, having, writes_rows
from autodist.graph.parts import Variable
from autodist.graph.subgraph import SubgraphBuilder
from autodist.graph.walks import writes_before
from autodist.kernels.place.copies import add_copy, read_before, take_copy, wait_for
from autodist.kernels.place.partition.layouts import Along, Routed, RowIds
from autodist.kernels.place.partition.routes import gather_rows, route
from autodist.kernels.place.partition.work import PartitionedVariable, Work
from autodist.placement.partitioning import WHOLE

Rule = Callable[[Work, NodeDef, PartitionedVariable], bool]


def access(work: Work, node: NodeDef) -> bool:
    """Rewrites a node that takes the handle of a partitioned variable; returns True if it takes one.

    Raises:
        StrategyError: control flow of TensorFlow 1 writes such a variable.
    """
    cut = next((cut for name in data_inputs(node) if (cut := work.variable(name))), None)
    if cut is None:
        _require_no_write(work, node)
        return False
    if node.op != "Identity":  # consumers of the Identity are rewritten on their own
        rule = _rule_of(node.op)
        if rule is None or not rule(work, node, cut):
            use_unpartitioned_copy(work, node)
    return True


def _rule_of(op: str) -> Rule | None:
    if op in having(Trait.ASSIGNMENT):
        return write
    if op.startswith("ResourceApply") or writes_rows(op):
        return apply_by_shard
    return READS.get(op)


def _require_no_write(work: Work, node: NodeDef) -> None:
    """Refuses writes behind an Enter or a Switch: these get the concatenated value, and a write would be lost."""
    effect = work.effects.get(node.name)
    lost = effect.writes & work.variables.keys() if effect else frozenset()
    for handle in sorted(lost):
        raise StrategyError(
            f"{work.variables[handle].variable.name} is partitioned, and {node.op} ({node.name}) writes it inside a "
            "loop or a branch of TensorFlow 1's control flow, which cannot be done shard by shard. Do not partition "
            "the variable, or use the control flow of TensorFlow 2 (tf.compat.v1.enable_control_flow_v2())."
        )


def use_unpartitioned_copy(work: Work, node: NodeDef) -> None:
    """Makes a node use unpartitioned copies of variables, and writes its results back to the shards.

    loop(v)    becomes    v/whole ← concat(v/shard_0, v/shard_1);  loop(v/whole);  v/shard_k ← a part of v/whole
    """
    taken: dict[str, list[str]] = {}
    for name in data_inputs(node):
        cut = work.variable(name)
        if cut is not None:
            taken.setdefault(cut.variable.handle, []).append(name)
    effect, written = work.effects.get(node.name), []
    for handle, names in taken.items():
        cut = work.variables[handle]
        fresh = _add_refreshed_copy(work, node, cut, names)
        if effect and handle in effect.writes:
            written += _write_back(work, node, cut, fresh)
    if written:
        work.order_after(node.name, [node.name, *written], by_shard=False)
        work.editor.write_before_reads(node.name, written, work.step.graph_index.readers(node.name))


def _add_refreshed_copy(work: Work, node: NodeDef, cut: PartitionedVariable, taken: list[str]) -> str:
    """Adds an unpartitioned copy of a variable for `node`; returns its handle after the refresh before the node."""
    variable = cut.variable
    whole = replace(variable, name=f"{variable.name}{WHOLE}", handle=f"{variable.handle}{WHOLE}")
    if whole.handle not in work.editor:
        work.copies.append(whole)
        add_copy(work.editor, variable, whole.handle, WHOLE)
    label = f"{whole.handle}/for/{node.name}"
    writes = writes_before(work.step.graph_index, node.name, variable.handle)
    value = read_before(work.editor, node.name, variable, label, writes=writes)
    work.editor.note({tensor(value): tf.TensorSpec(whole.shape, whole.dtype)})
    queries = _queries_before(work, node, cut)
    if queries:
        _read_if_set(work, value, cut, queries)
    else:
        read(work, work.editor[value], cut)
    _, fresh = take_copy(work.editor, [node.name], taken, whole.handle, value)
    return tensor(fresh)


def _queries_before(work: Work, node: NodeDef, cut: PartitionedVariable) -> list[str]:
    """Returns the initialization queries that `node` depends on; it then reads the variable only in a branch."""
    queries = [n for n in work.editor.consumers(cut.variable.handle) if work.editor[n].op == "VarIsInitializedOp"]
    return sorted(work.editor.ancestors([node.name]).intersection(queries)) if queries else []


def _read_if_set(work: Work, name: str, cut: PartitionedVariable, queries: list[str]) -> None:
    """Makes a read return zeros, which are unused, if the variable has no value yet.

    The read comes after the query. Initializers may set the variable at the same time, and if the query finds it set,
    the read must return its value.
    """
    waits = [*work.waits(work.editor[name]), *queries]

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


def _write_back(work: Work, node: NodeDef, cut: PartitionedVariable, fresh: str) -> list[str]:
    """Writes a node's new value of the unpartitioned copy to the shards; returns the writes.

    It reads the copy by the handle after the refresh: what waits for a conditional does not wait for the inputs of the
    branch that was not taken.
    """
    work.written_whole[cut.variable.name] = f"{node.op} ({node.name})"
    work.log(f"{cut.variable.name} is partitioned, and is concatenated for {node.op} ({node.name}), which writes it")
    with work.subgraph("written") as f:
        with tf.control_dependencies([f.after(wait_for(work.editor, node.name))]):
            value = tf.raw_ops.ReadVariableOp(resource=f.input(fresh, tf.resource), dtype=cut.variable.dtype)
        parts = tf.split(value, list(cut.cut.sizes), cut.cut.axis)
        writes = [
            tf.raw_ops.AssignVariableOp(resource=f.input(shard.handle, tf.resource), value=part)
            for shard, part in zip(cut.shards, parts, strict=True)
        ]
    return list(map(f.name, writes))


_VALUES = ("grad", "delta", "updates")
"""Inputs of update ops that have the variable's shape, or are rows of it."""


def write(work: Work, node: NodeDef, cut: PartitionedVariable) -> bool:
    values = work.along(data_inputs(node)[1], cut.cut)
    copies = work.clones(node, [[shard.handle, value] for shard, value in zip(cut.shards, values, strict=True)])
    work.order_after(node.name, copies, removed=True)
    return True


def apply_by_shard(work: Work, node: NodeDef, cut: PartitionedVariable) -> bool:
    """Rewrites an update of a variable and its slots: `ResourceApplyAdam`, `ResourceSparseApplyAdagrad`, row scatters.

    Returns False if a slot serves other variables too and so is partitioned differently, or if elements are not indexed
    by rows.
    """
    if node.op.startswith("ResourceScatterNd"):
        return False
    names = [argument.name for argument in op_def_registry.get(node.op).input_arg]
    inputs = dict(zip(names, data_inputs(node), strict=True))
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
    """Returns the inputs of each shard's copy of an op that writes rows, for "indices" and each of `rows`."""
    if cut.cut.axis > 0:
        parts = {name: list(work.along(i, cut.within_rows(work.rank(i)))) for name, i in rows.items()}
        return {"indices": list(work.alike(ids, len(cut.shards))), **parts}
    layout = work.layout(ids)
    if isinstance(layout, RowIds) and layout.cut == cut.cut:
        if all(work.layout(i) == Routed(layout.key) for i in rows.values()):
            return {"indices": list(work.pieces(ids)), **{name: list(work.pieces(i)) for name, i in rows.items()}}
    routed = route(work, ids, cut.cut, list(rows.values()))
    return {"indices": list(routed.ids), **{name: list(own) for name, own in zip(rows, routed.rows, strict=True)}}


def read(work: Work, node: NodeDef, cut: PartitionedVariable) -> bool:
    """Rewrites a read of the whole value as the concatenation of the shards' reads."""
    copies = work.clones(node, [[shard.handle] for shard in cut.shards])
    _concatenate(work, node, copies, Along(cut.cut))
    return True


def _concatenate(work: Work, node: NodeDef, copies: tuple[str, ...], layout: Along | Routed) -> None:
    """Replaces a node's output by the concatenation of its copies' outputs."""
    out = tensor(node.name)
    axis = layout.cut.axis if isinstance(layout, Along) else 0
    work.register(out, layout, copies)
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
    """Rewrites a gather as gathers from the shards that hold the rows."""
    if is_in_batches(node):
        dims = node.attr["batch_dims"].i
        return _of_whole(work, node, cut, lambda whole, places: tf.gather(whole, places, batch_dims=dims))
    ids = data_inputs(node)[1]
    if cut.cut.axis > 0:
        return _gather_parts_of_rows(work, node, cut, ids)
    by = work.layout(ids)
    if isinstance(by, RowIds) and by.cut == cut.cut:
        pairs = zip(cut.shards, work.pieces(ids), strict=True)
        _concatenate(work, node, work.clones(node, [[shard.handle, own] for shard, own in pairs]), Routed(by.key))
        return True
    routed = route(work, ids, cut.cut)
    copies = work.clones(node, [[shard.handle, own] for shard, own in zip(cut.shards, routed.ids, strict=True)])
    for copy in copies:
        work.editor.note({tensor(copy): tf.TensorSpec([None, *cut.variable.shape[1:]], cut.variable.dtype)})
    work.order_after(node.name, copies)
    work.becomes(node.name, functools.partial(gather_rows, ids, routed, copies))
    return True


def _gather_parts_of_rows(work: Work, node: NodeDef, cut: PartitionedVariable, ids: str) -> bool:
    """Rewrites a gather from a variable that is not cut by rows: each shard has a part of each row."""
    rank = work.rank(tensor(node.name))
    if rank is None:
        return False
    pairs = zip(cut.shards, work.alike(ids, len(cut.shards)), strict=True)
    copies = work.clones(node, [[shard.handle, own] for shard, own in pairs])
    _concatenate(work, node, copies, Along(cut.within_rows(rank)))
    return True


def _of_whole(
    work: Work, node: NodeDef, cut: PartitionedVariable, gather: Callable[[tf.Tensor, tf.Tensor], tf.Tensor]
) -> bool:
    """Rewrites a gather as one from the concatenation of the shards' reads."""
    reading = NodeDef(name=node.name, op="ReadVariableOp", input=node.input)
    reading.attr["dtype"].CopyFrom(node.attr["dtype"])
    for key in filter(lambda key: key.startswith("_"), node.attr):
        reading.attr[key].CopyFrom(node.attr[key])
    copies = work.clones(reading, [[shard.handle] for shard in cut.shards])
    work.editor.note(
        {tensor(copy): tf.TensorSpec(one.shape, one.dtype) for copy, one in zip(copies, cut.shards, strict=True)}
    )
    places = data_inputs(node)[1]
    work.order_after(node.name, copies)
    work.becomes(node.name, lambda f: gather(tf.concat(f.inputs(map(tensor, copies)), cut.cut.axis), f.input(places)))
    return True


READS: Mapping[str, Callable[[Work, NodeDef, PartitionedVariable], bool]] = {
    "ReadVariableOp": read,
    "ResourceGather": _gather,
    "ResourceGatherNd": functools.partial(_of_whole, gather=tf.gather_nd),
    "VariableShape": _shape,
    "VarIsInitializedOp": _is_initialized,
}
"""The rules for reads of the whole variable; other ops get an unpartitioned copy."""
