"""Gradients of variables that are cut: one for each shard, made before they are combined."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import tensorflow as tf

from autodist.graph.names import node_of
from autodist.graph.parts import VariableGradient
from autodist.kernels.place.partition.layouts import Alike, Along, Routed, RowIds
from autodist.kernels.place.partition.routes import route
from autodist.kernels.place.partition.work import PartitionedVariable, Work


def cut_gradients(
    work: Work, gradients: Sequence[VariableGradient], once: Collection[str]
) -> tuple[VariableGradient, ...]:
    """The gradients of the step, those of cut variables in pieces.

    What runs once and asks for the whole of such a gradient gets its pieces put together again; a dense one cut along
    an axis, a sparse one as rows in the order of the shards.
    """
    made: list[VariableGradient] = []
    for gradient in gradients:
        cut = work.variables.get(work.item.by_name[gradient.variable].handle)
        if cut is None:
            made.append(gradient)
            continue
        pieces = _cut(work, gradient, cut, once)
        made += [
            replace(gradient, variable=shard.name, tensors=tensors)
            for shard, tensors in zip(cut.shards, pieces, strict=True)
        ]
    return tuple(made)


def _cut(
    work: Work, gradient: VariableGradient, cut: PartitionedVariable, once: Collection[str]
) -> list[tuple[str, ...]]:
    readers = [[c for c in work.editor.consumers(node_of(t)) if c in once] for t in gradient.tensors]
    if not gradient.is_sparse:
        pieces, wholes = _cut_dense(work, gradient.tensors[0], cut)
    elif cut.cut.axis == 0:
        pieces, wholes = _route_rows(work, gradient, cut)
    else:
        pieces, wholes = _cut_rows(work, gradient, cut)
    for name, whole, who in zip(gradient.tensors, wholes, readers, strict=True):
        work.editor.rewire(name, whole, who)
    return pieces


_Cut = tuple[list[tuple[str, ...]], Sequence[str]]
"""The gradient's tensors for each shard, and those that stand for the whole."""


def _cut_dense(work: Work, name: str, cut: PartitionedVariable) -> _Cut:
    spec = tf.TensorSpec(cut.variable.shape, work.spec(name).dtype)
    with work.subgraph("gradient") as f:
        split = tf.split(f.input(name, spec.dtype, spec.shape), list(cut.cut.sizes), cut.cut.axis)
    pieces = tuple(map(f.name, split))
    whole = _together(work, pieces, cut.cut.axis)
    work.know(whole, Along(cut.cut), pieces)
    return [(piece,) for piece in pieces], [whole]


def _route_rows(work: Work, gradient: VariableGradient, cut: PartitionedVariable) -> _Cut:
    ids, values = gradient.tensors
    brought = route(work, ids, cut.cut, [values])
    with work.subgraph("gradient") as f:
        own = f.inputs(brought.ids)
        whole = tf.concat([i + start for i, start in zip(own, cut.cut.starts, strict=True)], 0)
    all_ids = f.name(whole)
    all_values = _together(work, brought.rows[0], 0)
    work.know(all_ids, RowIds(all_ids, cut.cut), brought.ids)
    work.know(all_values, Routed(all_ids), brought.rows[0])
    return list(zip(brought.ids, brought.rows[0], strict=True)), [all_ids, all_values]


def _cut_rows(work: Work, gradient: VariableGradient, cut: PartitionedVariable) -> _Cut:
    """Columns of rows: every shard has a part of each."""
    with work.subgraph("gradient") as f:
        (asked, rows) = f.inputs(gradient.tensors)
        copies = [tf.identity(asked) for _ in cut.shards]
        split = tf.split(rows, list(cut.cut.sizes), cut.cut.axis)
        one = tf.identity(copies[0])
    own, pieces = tuple(map(f.name, copies)), tuple(map(f.name, split))
    all_ids = f.name(one)
    whole = _together(work, pieces, cut.cut.axis)
    work.know(all_ids, Alike(), own)
    work.know(whole, Along(cut.cut), pieces)
    return list(zip(own, pieces, strict=True)), [all_ids, whole]


def _together(work: Work, pieces: Sequence[str], axis: int) -> str:
    with work.subgraph("gradient") as f:
        whole = tf.concat(f.inputs(pieces), axis)
    return f.name(whole)
