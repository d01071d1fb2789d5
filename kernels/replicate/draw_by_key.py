"""Random draws per example from a seed that all replicas share: as on one device, or different on each replica."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass

import tensorflow as tf

from autodist.graph.editor import GraphEditor, NodeDef
from autodist.graph.names import data_inputs, is_control, node_of, tensor
from autodist.graph.op_types import input_names
from autodist.graph.ops import Trait
from autodist.graph.step import ALL_EXAMPLES, EXAMPLES, PlacedStep
from autodist.graph.subgraph import SubgraphBuilder, subgraph
from autodist.kernels.context import Context
from autodist.kernels.replicate.advance_generators import AddedToDraws
from autodist.kernels.replicate.split_batch import first_example
from autodist.layout import PerExample, Propagation, RowsOfDraw


@dataclass(frozen=True)
class SharedSeedDraw:
    """A node that would draw the same numbers on each replica, for different examples.

    Attributes:
        node: its name.
        seed: the tensor that seeds the draw.
        axis: the batch axis of the draw, if each replica can draw for the whole batch; otherwise None.
        per: number of rows per example, if that is known.
    """

    node: str
    seed: str
    axis: int | None = None
    per: int = 0


def find_shared_seed_draws(
    step: PlacedStep, flows: Propagation, replica_dependent: Set[str]
) -> Iterator[SharedSeedDraw]:
    """Yields the draws from a seed shared by all replicas, among the nodes that are copied for every replica."""
    for node in step.graph_index.having(Trait.BY_KEY):
        inputs = data_inputs(node)
        first, *_ = called = input_names(node.op)
        seed = next(inputs[k] for k, name in enumerate(called) if name in ("seed", "key"))
        if node.name not in replica_dependent or node_of(seed) in replica_dependent:
            continue
        kind, per = flows.kind(node.name), flows.rows_for_each(node.name)
        by_shape_alone = first == "shape" and replica_dependent.isdisjoint(map(node_of, inputs[1:]))
        if by_shape_alone and isinstance(kind, PerExample) and per is not None:
            yield SharedSeedDraw(node.name, seed, kind.axis, per)
        else:
            yield SharedSeedDraw(node.name, seed)


def all_examples(step: PlacedStep, context: Context) -> str | None:
    """Returns the tensor with the number of examples of all replicas; None if each worker only knows its own."""
    if step.is_global:
        return ALL_EXAMPLES
    return EXAMPLES if context.workers == 1 else None


def first_and_all(f: SubgraphBuilder, index: tf.Tensor, examples: str, replicas: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the first example of a replica, and the number of all examples.

    Args:
        f: the subgraph to build in.
        index: of the replica, shape [1].
        examples: the tensor with the number of examples of all replicas.
        replicas: number of replicas.
    """
    count = f.input(examples, tf.int64, [])
    first = first_example(index, count // replicas, count % replicas)
    return tf.minimum(first, tf.maximum(count - 1, 0)), count  # a replica without examples uses a row of weight 0


def rows_of_whole(
    f: SubgraphBuilder,
    node: NodeDef,
    inputs: Sequence[str],
    dtype: tf.DType,
    rows: RowsOfDraw,
    first: tf.Tensor,
    count: tf.Tensor,
) -> tf.Tensor:
    """Draws for the whole batch and slices the rows of one replica.

    Args:
        f: the subgraph to build in.
        node: the node that draws for one replica.
        inputs: of the node, its shape first.
        dtype: of the numbers.
        rows: the axis of the examples, and the number of rows of each.
        first: the replica's first example, shape [1].
        count: the number of all examples.
    """
    (axis, per), (shape, *others) = rows, inputs
    part = f.input(shape)
    own = tf.cast(part, tf.int64)
    is_split = tf.equal(tf.range(tf.size(part)), axis)
    whole = tf.where(is_split, tf.maximum(count, 1) * per, own)
    drawing = f.add(node, "whole", [f.name(tf.cast(whole, part.dtype)), *others])
    return tf.slice(f.input(drawing.name, dtype), tf.where(is_split, first * per, 0), own)


def draw_for_all(
    editor: GraphEditor, step: PlacedStep, draws: Sequence[SharedSeedDraw], examples: str, replicas: int
) -> AddedToDraws:
    """Makes nodes draw for the whole batch and slice the rows of their replica, so that they equal those of one device.

    The node becomes an identity of its rows. The new drawing node is copied for each replica with it.

    Args:
        editor: of the step.
        step: the captured step.
        draws: the nodes.
        examples: the tensor with the number of examples of all replicas.
        replicas: number of replicas.
    """
    indices: list[str] = []
    nodes: dict[str, str] = {}
    for draw in draws:
        node = editor[draw.node]
        inputs = [name for name in node.input if not is_control(name)]
        with subgraph(editor, f"draw_for_all/{draw.node}", step.spec_of) as f:
            index = tf.constant([1], tf.int64)
            first, count = first_and_all(f, index, examples, replicas)
            dtype = step.spec_of(tensor(draw.node)).dtype
            rows = rows_of_whole(f, node, inputs, dtype, (draw.axis or 0, draw.per), first, count)
        editor.pass_on(draw.node, f.name(rows), rows.dtype, filter(is_control, node.input))
        indices.append(node_of(f.name(index)))
        nodes |= dict.fromkeys(f.made, draw.node)
    return AddedToDraws(tuple(indices), nodes)
