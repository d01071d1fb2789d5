"""Routes: rows brought to the shards that they belong to, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import tensorflow as tf

from autodist.graph.placement import Partitioning
from autodist.graph.subgraph import SubgraphBuilder
from autodist.kernels.place.partition.work import Work


@dataclass(frozen=True)
class Route:
    """Where rows go.

    Attributes:
        ids: for each shard, which of its rows are meant, counted within the shard.
        places: for each shard, where these stood among all.
        rows: for each tensor of rows that was brought along, its part for each shard.
    """

    ids: tuple[str, ...]
    places: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...] = ()


def route(work: Work, ids: str, cut: Partitioning, rows: Sequence[str] = ()) -> Route:
    """Brings the rows `ids` of a variable that is cut along its first axis to their shards, by one partition of places.

    Args:
        work: where.
        ids: integers of any shape; an id that is out of range fails while the step runs, as it does on one device.
        cut: of the variable.
        rows: tensors with the shape of `ids` first, to be brought along.
    """
    count = len(cut.sizes)
    with work.subgraph("route") as f:
        (asked,) = f.inputs([ids])
        flat = tf.reshape(asked, [-1])
        ends = tf.constant([start + size for start, size in zip(cut.starts, cut.sizes, strict=True)], flat.dtype)
        shard = tf.searchsorted(ends, flat, side="right")
        places = tf.dynamic_partition(tf.range(tf.size(flat)), shard, count)
        own = [tf.gather(flat, place) - start for place, start in zip(places, cut.starts, strict=True)]
        brought = [
            [tf.gather(tf.reshape(row, _flat_shape(row, asked)), place) for place in places] for row in f.inputs(rows)
        ]
    return Route(
        tuple(map(f.name, own)), tuple(map(f.name, places)), tuple(tuple(map(f.name, parts)) for parts in brought)
    )


def _flat_shape(rows: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
    return tf.concat([[-1], tf.shape(rows)[tf.rank(ids) :]], 0)


def gather_rows(ids: str, asked: Route, parts: Sequence[str], f: SubgraphBuilder) -> tf.Tensor:
    """The rows that shards gave for a route, in the order in which they were asked for."""
    got = f.inputs(parts)
    whole = tf.raw_ops.DynamicStitch(indices=f.inputs(asked.places), data=got)
    (shape,) = f.inputs([ids])
    return tf.reshape(whole, tf.concat([tf.shape(shape), tf.constant(got[0].shape[1:].as_list(), tf.int32)], 0))
