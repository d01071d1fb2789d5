"""The whole of variables that are cut, for what is not done shard by shard: loops, functions, writes of other kinds."""

from __future__ import annotations

from dataclasses import replace

import tensorflow as tf

from autodist.graph.editor import NodeDef
from autodist.graph.names import tensor
from autodist.graph.parts import Variable
from autodist.graph.placement import WHOLE
from autodist.graph.subgraph import SubgraphBuilder
from autodist.kernels.place.copies import add_copy, read_before, take_copy
from autodist.kernels.place.partition.reads import read
from autodist.kernels.place.partition.work import PartitionedVariable, Work


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
