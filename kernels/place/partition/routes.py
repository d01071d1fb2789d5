"""Routing of rows to the shards that they belong to, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import tensorflow as tf

from autodist.graph.subgraph import SubgraphBuilder
from autodist.kernels.place.partition.work import Work
from autodist.placement.partitioning import Partitioning


@dataclass(frozen=True)
class Route:
    """The distribution of rows over shards.

    Attributes:
        ids: for each shard, the indices of the rows within the shard.
        places: for each shard, the positions of these rows among all rows.
        rows: for each routed tensor of rows, its part for each shard.
    """

    ids: tuple[str, ...]
    places: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...] = ()


def route(work: Work, ids: str, cut: Partitioning, rows: Sequence[str] = ()) -> Route:
    """Routes the rows `ids` of a variable that is cut along its first axis to their shards, by one dynamic partition.

    Args:
        work: the partitioning in progress.
        ids: integers of any shape; an id out of range fails when the step runs, as on one device.
        cut: the partitioning of the variable.
        rows: tensors whose leading axes have the shape of `ids`, to be routed too.
    """
    count = len(cut.sizes)
    with work.subgraph("route") as f:
        (indices,) = f.inputs([ids])
        flat = tf.reshape(indices, [-1])
        ends = tf.constant([start + size for start, size in zip(cut.starts, cut.sizes, strict=True)], flat.dtype)
        shard = tf.searchsorted(ends, flat, side="right")
        places = tf.dynamic_partition(tf.range(tf.size(flat)), shard, count)
        own = [tf.gather(flat, place) - start for place, start in zip(places, cut.starts, strict=True)]
        routed = [
            [tf.gather(tf.reshape(row, _flat_shape(row, indices)), place) for place in places] for row in f.inputs(rows)
        ]
    return Route(
        tuple(map(f.name, own)), tuple(map(f.name, places)), tuple(tuple(map(f.name, parts)) for parts in routed)
    )


def _flat_shape(rows: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
    return tf.concat([[-1], tf.shape(rows)[tf.rank(ids) :]], 0)


def gather_rows(ids: str, routed: Route, parts: Sequence[str], f: SubgraphBuilder) -> tf.Tensor:
    """Returns the rows that the shards returned for a route, in the order of `ids`."""
    received = f.inputs(parts)
    whole = tf.raw_ops.DynamicStitch(indices=f.inputs(routed.places), data=received)
    (shape,) = f.inputs([ids])
    return tf.reshape(whole, tf.concat([tf.shape(shape), tf.constant(received[0].shape[1:].as_list(), tf.int32)], 0))
