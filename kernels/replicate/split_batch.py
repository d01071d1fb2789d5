"""Splits the batch that is fed to a worker over its replicas, each of which gets consecutive rows."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import tensorflow as tf

from autodist.graph.editor import GraphEditor, NodeDef
from autodist.graph.names import node_of, tensor
from autodist.graph.step import ALL_EXAMPLES, EXAMPLES, PlacedStep
from autodist.graph.subgraph import Template, subgraph
from autodist.kernels.replicate.weights import ReplicaWeights

Clones = Sequence[Mapping[str, str]]


def split_batch(editor: GraphEditor, step: PlacedStep, clones: Clones) -> ReplicaWeights:
    """Slices each batch input per local replica; the first `examples % replicas` parts have one more example."""

    def named(name: str, k: int) -> str:
        node = node_of(name)
        return tensor(name).replace(node, clones[k].get(node, node), 1)

    axes = step.batch_axes
    if not axes:
        return ReplicaWeights(None, named, step.spec_of)
    for fed in (EXAMPLES, ALL_EXAMPLES)[: 1 + step.is_global]:
        node = NodeDef(name=node_of(fed), op="Placeholder")
        node.attr["dtype"].type = tf.int64.as_datatype_enum
        node.attr["shape"].shape.SetInParent()
        editor.add(node)
    lengths = {by: _count_rows(editor, step, by) for by in dict.fromkeys(step.apart.values())}
    if len(clones) == 1:
        return ReplicaWeights((EXAMPLES,), named, step.spec_of, step.is_global, {by: (n,) for by, n in lengths.items()})
    main = {name: axis for name, axis in axes.items() if name not in step.apart}
    sizes = _slice_inputs(editor, step, main, clones, EXAMPLES, "split_batch")
    apart = {
        by: _slice_inputs(
            editor,
            step,
            {n: axes[n] for n in axes if step.apart.get(n) == by},
            clones,
            count,
            f"split_apart/{node_of(by)}",
        )
        for by, count in lengths.items()
    }
    return ReplicaWeights(sizes, named, step.spec_of, step.is_global, apart)


def _count_rows(editor: GraphEditor, step: PlacedStep, name: str) -> str:
    """Returns the number of rows of an input that this worker is fed."""
    spec, axis = step.spec_of(name), step.inputs[name]
    with subgraph(editor, f"rows/{node_of(name)}") as f:
        count = tf.shape(f.input(name, spec.dtype, spec.shape), out_type=tf.int64)[axis]
    return f.name(count)


def _slice_inputs(
    editor: GraphEditor, step: PlacedStep, axes: Mapping[str, int], clones: Clones, counted: str, label: str
) -> tuple[str, ...]:
    """Slices inputs of `counted` rows each; returns the number of rows of each replica."""
    count = len(clones)
    captured = clones[0]
    consumers = {name: [c for c in editor.consumers(node_of(name)) if c in captured] for name in axes}
    specs = [step.spec_of(name) for name in axes]
    cutting = _cutting(count, tuple((spec.dtype, spec.shape, axis) for spec, axis in zip(specs, axes.values())))
    made = cutting.splice(editor, label, [counted, *axes])
    sizes, parts = made[:count], iter(made[count:])
    for name in axes:
        for k in range(count):
            editor.rewire(name, next(parts), [clones[k][c] for c in consumers[name]])
    return tuple(sizes)


@functools.lru_cache(maxsize=64)  # an evaluation step has the same batches as a training step
def _cutting(count: int, inputs: tuple[tuple[tf.DType, tf.TensorShape, int], ...]) -> Template:
    """Maps the number of examples and the inputs to the size of each replica's part and, per input, the parts."""

    def build(examples: tf.Tensor, *wholes: tf.Tensor) -> list[tf.Tensor]:
        share, rest = examples // count, examples % count
        sizes = [share + tf.cast(k < rest, tf.int64) for k in range(count)]
        starts = [first_example(k, share, rest) for k in range(count)]
        parts = [
            _rows(whole, axis, starts[k], sizes[k])
            for whole, (_, _, axis) in zip(wholes, inputs, strict=True)
            for k in range(count)
        ]
        return [*sizes, *parts]

    return Template([tf.TensorSpec([], tf.int64), *(tf.TensorSpec(shape, dtype) for dtype, shape, _ in inputs)], build)


def first_example(part: int | tf.Tensor, share: tf.Tensor, rest: tf.Tensor) -> tf.Tensor:
    """Returns the start of a part, if parts have `share` examples and the first `rest` of them one more."""
    return part * share + tf.minimum(tf.convert_to_tensor(part, tf.int64), rest)


def _rows(whole: tf.Tensor, axis: int, start: tf.Tensor, size: tf.Tensor) -> tf.Tensor:
    """Returns `size` rows from `start`; if `size` is 0, one existing row."""
    begin = tf.minimum(start, tf.shape(whole, out_type=tf.int64)[axis] - 1)
    rank = whole.shape.rank
    if rank is None:  # known when the step runs
        is_split = tf.equal(tf.range(tf.rank(whole)), axis)
        return tf.slice(whole, tf.where(is_split, begin, 0), tf.where(is_split, tf.maximum(size, 1), -1))
    at = [begin if a == axis else tf.constant(0, tf.int64) for a in range(rank)]
    length = [tf.maximum(size, 1) if a == axis else tf.constant(-1, tf.int64) for a in range(rank)]
    return tf.slice(whole, tf.stack(at), tf.stack(length))
