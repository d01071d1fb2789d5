"""All-reduce between workers: SHUFFLE, through queues, for whatever has to be the same sum on every worker."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import tensorflow as tf

from autodist.graph.editor import GraphEditor
from autodist.graph.fragment import Fragment, fragment
from autodist.graph.item import GraphItem, Join
from autodist.kernels.base import Context, Kernel
from autodist.kernels.buckets import BUCKET_BYTES, Bucket, key_of, make_buckets
from autodist.kernels.exchange import Exchange
from autodist.kernels.plan import Plan
from autodist.kernels.results import Results
from autodist.kernels.sums import ordered_sum

DIRECT_BYTES = 64 << 10
"""Up to this size a bucket is sent whole to every worker: one hop, where cutting it into pieces takes two."""


@dataclass(frozen=True)
class ReduceByShuffle(Kernel):
    """Sums joins over the workers, in the order of the workers, so that all get the same bits in every run.

    A bucket is cut into one piece for each worker; each piece is brought to its owner by a queue per source, added,
    divided by the weight, and handed to each worker through a queue of that worker's own: two hops, and as many bytes
    as a ring. Rows go whole to every worker, since their number differs.

    Attributes:
        bucket_bytes: size at which a bucket is closed.
    """

    bucket_bytes: int = BUCKET_BYTES
    name: ClassVar[str] = "reduce-by-shuffle"

    def apply(self, item: GraphItem, context: Context) -> GraphItem:
        plan = Plan(context.strategy)
        mine = [join for join in item.joins if plan.travels_by_shuffle(join)]
        if not mine:
            return item
        results = Results(GraphEditor(item.graph_def))
        dense = [join for join in mine if not join.is_sparse]
        for bucket in make_buckets(dense, plan.group, self.bucket_bytes):
            _reduce_bucket(results, bucket, context)
        for join in mine:
            if join.is_sparse:
                _gather_rows(results, join, context)
        return results.applied_to(item, mine)


def _reduce_bucket(results: Results, bucket: Bucket, context: Context) -> None:
    exchange = Exchange(context, bucket.key)
    with fragment(results.editor, f"all_reduce/{bucket.key}") as f, tf.device(context.cpu(context.worker)):
        flat = bucket.pack(f)
        weight = weight_of(f, bucket.joins[0])
        by = _directly if bucket.byte_size <= DIRECT_BYTES else _in_pieces
        values = bucket.unpack(by(exchange, bucket, flat, weight))
    for join, value in zip(bucket.joins, values, strict=True):
        results.give(join, [f.name(value)])
    results.run(f.name(op) for op in exchange.effects)


def weight_of(f: Fragment, join: Join) -> list[tf.Tensor]:
    """The weight that travels with a join, if there is one."""
    return [] if join.weight is None else [f.input(join.weight, join.weight_dtype, [])]


def _directly(exchange: Exchange, bucket: Bucket, flat: tf.Tensor, weight: list[tf.Tensor]) -> tf.Tensor:
    return mean_of(exchange.all_to_all("whole", [flat, *weight]))


def _in_pieces(exchange: Exchange, bucket: Bucket, flat: tf.Tensor, weight: list[tf.Tensor]) -> tf.Tensor:
    context = exchange.context
    pieces = tf.split(flat, bucket.cut(context.workers))
    summed = []
    for owner, piece in enumerate(pieces):
        if owner != context.worker:
            exchange.send(owner, "piece", [piece, *weight])
            summed.append(exchange.receive(owner, "sum", [piece])[0])
            continue
        whole = mean_of(
            [piece, *weight] if source == owner else exchange.receive(source, "piece", [piece, *weight])
            for source in range(context.workers)
        )
        for to in range(context.workers):
            if to != owner:
                exchange.send(to, "sum", [whole])
        summed.append(whole)
    return tf.concat(summed, 0)


def mean_of(parts: Iterable[list[tf.Tensor]]) -> tf.Tensor:
    """The sum of the parts' values, divided by the sum of their weights if they have any."""
    parts = list(parts)
    total = ordered_sum([p[0] for p in parts])
    if len(parts[0]) == 1:
        return total
    return tf.math.divide_no_nan(total, tf.cast(ordered_sum([p[1] for p in parts]), total.dtype))


def own_rows(f: Fragment, join: Join) -> list[tf.Tensor]:
    """This worker's part of a sparse join: indices, values and, if there is one, the weight."""
    ids = f.input(join.local[0], join.index_dtype, [None])
    return [ids, f.input(join.local[1], join.dtype, join.shape), *weight_of(f, join)]


def rows_of(parts: list[list[tf.Tensor]]) -> list[tf.Tensor]:
    """Indices and values of all parts, in their order; values divided by the sum of the weights if there are any."""
    ids, values = (tf.concat([p[at] for p in parts], 0) for at in (0, 1))
    if len(parts[0]) == 3:
        values = tf.math.divide_no_nan(values, tf.cast(ordered_sum([p[2] for p in parts]), values.dtype))
    return [ids, values]


def _gather_rows(results: Results, join: Join, context: Context) -> None:
    key = key_of([join])
    exchange = Exchange(context, key)
    with fragment(results.editor, f"all_gather/{key}") as f, tf.device(context.cpu(context.worker)):
        rows = rows_of(exchange.all_to_all("rows", own_rows(f, join)))
    results.give(join, [f.name(t) for t in rows])
    results.run(f.name(op) for op in exchange.effects)
