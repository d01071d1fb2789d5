"""All-reduce between workers: SHUFFLE, through queues, for whatever has to be the same sum on every worker."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import tensorflow as tf

from autodist.compressors import Compressor
from autodist.graph.fragment import Fragment, fragment
from autodist.graph.item import GraphItem
from autodist.graph.parts import Join, Merge
from autodist.kernels.base import Context, Kernel
from autodist.kernels.communicate.bucket_reduction import BucketReduction
from autodist.kernels.communicate.buckets import BUCKET_BYTES, Bucket, key_of, make_buckets
from autodist.kernels.communicate.chosen_compressor import compressor_of
from autodist.kernels.communicate.exchange import Exchange
from autodist.kernels.communicate.results import Results
from autodist.kernels.sums import merged, ordered_sum, rows_together

EVENLY_CUT = 16
"""Up to so many workers a bucket has one size; for more it grows with them, so that its pieces get no smaller."""

DIRECT_BYTES = 64 << 10
"""Up to this size a bucket goes whole to any number of workers: one hop, where cutting it into pieces takes two."""


@dataclass(frozen=True)
class ReduceByShuffle(Kernel):
    """Sums joins over the workers, in the order of the workers, so that all get the same bits in every run.

    A bucket is cut into one piece for each worker that computes; each piece is brought to its owner by a queue per
    source, added, divided by the weight, and handed to each worker through a queue of that worker's own: two hops, and
    as many bytes as a ring. Small buckets, and all where there are two workers, go whole to every worker, which adds
    them itself: one hop, and between two workers no more bytes than that. Rows go whole too, since their number
    differs. Gradients that a strategy compresses are in buckets apart, which their compressor adds up; where there is
    one worker, nothing travels and nothing is compressed.

    Each element is the sum of the workers' in their order, whatever bucket it is in. So buckets may grow with the
    workers, as messages would otherwise: 2·(W-1) for each bucket and worker. Those of a compressor, which may look at a
    bucket or a piece as a whole, do not grow.

    Attributes:
        bucket_bytes: size at which a bucket is closed; for W workers, W / `EVENLY_CUT` times that, if this is more.
    """

    bucket_bytes: int = BUCKET_BYTES
    name: ClassVar[str] = "reduce-by-shuffle"

    def apply(self, item: GraphItem, context: Context) -> GraphItem:
        plan, replication = context.plan, item.replication
        mine = [join for join in replication.joins if plan.travels_by_shuffle(join)] if replication else []
        if replication is None or not mine:
            return item
        results = Results(item, replication)
        stored_as = _names_in_session(item)
        for bucket, compressor in self._buckets(mine, context):
            if compressor is None:
                _reduce_bucket(results, bucket, context)
            else:
                _compress_bucket(results, bucket, compressor, stored_as, context)
        for join in mine:
            if join.is_sparse:
                _gather_rows(results, join, context)
            elif join.merge is Merge.ROWS:
                _put_one_after_the_other(results, join, context)
        return results.to_item(mine)

    def _buckets(self, joins: Iterable[Join], context: Context) -> list[tuple[Bucket, Compressor | None]]:
        plan = context.plan
        compressors = {join.name: compressor_of(plan, join) for join in joins}
        grown = self.bucket_bytes * max(len(context.computing), EVENLY_CUT) // EVENLY_CUT

        def group_of(join: Join) -> Hashable:
            return plan.group(join), compressors[join.name]

        dense = [join for join in joins if not join.is_sparse and join.merge is not Merge.ROWS]
        plain = [join for join in dense if compressors[join.name] is None]
        compressed = [join for join in dense if compressors[join.name] is not None]
        buckets = [*make_buckets(plain, plan.group, grown), *make_buckets(compressed, group_of, self.bucket_bytes)]
        return [(bucket, compressors[bucket.joins[0].name]) for bucket in buckets]


def _reduce_bucket(results: Results, bucket: Bucket, context: Context) -> None:
    with fragment(results.editor, f"all_reduce/{bucket.key}") as f, tf.device(context.cpu(context.worker)):
        exchange = Exchange(f, context, bucket.key)
        flat = bucket.pack(f)
        weight = weight_of(f, bucket.joins[0])
        goes_whole = context.workers <= 2 or bucket.byte_size <= DIRECT_BYTES
        reduce = _directly if goes_whole else _in_pieces
        values = bucket.unpack(reduce(exchange, bucket, flat, weight))
    for join, value in zip(bucket.joins, values, strict=True):
        results.give(join, [f.name(value)])
    results.editor.run(exchange.effects)


def _compress_bucket(
    results: Results, bucket: Bucket, compressor: Compressor, stored_as: Mapping[str, str], context: Context
) -> None:
    with fragment(results.editor, f"all_reduce/{bucket.key}") as f, tf.device(context.cpu(context.worker)):
        exchange = Exchange(f, context, bucket.key)
        reduction = BucketReduction(f, bucket, exchange, stored_as)
        values = compressor.add_up(reduction)
        reduction.finish(values)
    for join, value in zip(bucket.joins, values, strict=True):
        results.give(join, [f.name(value)])
    results.editor.run(exchange.effects)
    results.editor.initialize({name: f.name(op) for name, op in reduction.initializers.items()})


def _names_in_session(item: GraphItem) -> dict[str, str]:
    """By a variable's name, the name under which the session knows it."""
    stored = {n.name: n.attr["shared_name"].s.decode() for n in item.wiring.of_op("VarHandleOp")}
    return {v.name: stored[v.handle] for v in item.variables if v.handle in stored}


def weight_of(f: Fragment, join: Join) -> list[tf.Tensor]:
    """The weight that travels with a join, if there is one."""
    return [] if join.weight is None else [f.input(join.weight, join.weight_dtype, [])]


def _directly(exchange: Exchange, bucket: Bucket, flat: tf.Tensor, weight: list[tf.Tensor]) -> tf.Tensor:
    return mean_of(exchange.all_to_all("whole", [flat, *weight]), bucket.merge)


def _in_pieces(exchange: Exchange, bucket: Bucket, flat: tf.Tensor, weight: list[tf.Tensor]) -> tf.Tensor:
    context = exchange.context
    owners = context.computing
    pieces = dict(zip(owners, tf.split(flat, bucket.cut(len(owners))), strict=True))
    mine = pieces.pop(context.worker, None)
    if mine is not None:
        for owner, piece in pieces.items():
            exchange.send(owner, "piece", [piece, *weight])
    summed = exchange.receive_all("sum", {owner: [piece] for owner, piece in pieces.items()})
    if mine is not None:
        whole = mean_of(exchange.parts("piece", [mine, *weight]), bucket.merge)
        for to in range(context.workers):
            if to != context.worker:
                exchange.send(to, "sum", [whole])
        summed[context.worker] = [whole]
    return tf.concat([summed[owner][0] for owner in owners], 0)


def mean_of(parts: Iterable[list[tf.Tensor]], merge: Merge = Merge.ADD) -> tf.Tensor:
    """The sum of the parts' values, divided by the sum of their weights if they have any; or how else they merge."""
    parts = list(parts)
    total = merged([p[0] for p in parts], merge)
    if len(parts[0]) == 1:
        return total
    return tf.math.divide_no_nan(total, tf.cast(ordered_sum([p[1] for p in parts]), total.dtype))


def own_rows(f: Fragment, join: Join) -> list[tf.Tensor]:
    """This worker's part of a sparse join: indices, values and, if there is one, the weight."""
    ids = f.input(join.local[0], join.index_dtype, [None])
    return [ids, f.input(join.local[1], join.dtype, join.shape), *weight_of(f, join)]


def rows_of(join: Join, parts: list[list[tf.Tensor]]) -> list[tf.Tensor]:
    """Indices and values of all parts; values divided by the sum of the weights if there are any."""
    ids, values = rows_together(join.row_join, join.aligned, [p[0] for p in parts], [p[1] for p in parts])
    if len(parts[0]) == 3:
        values = tf.math.divide_no_nan(values, tf.cast(ordered_sum([p[2] for p in parts]), values.dtype))
    return [ids, values]


def _gather_rows(results: Results, join: Join, context: Context) -> None:
    key = key_of([join])
    with fragment(results.editor, f"all_gather/{key}") as f, tf.device(context.cpu(context.worker)):
        exchange = Exchange(f, context, key)
        rows = rows_of(join, exchange.all_to_all("rows", own_rows(f, join)))
    results.give(join, [f.name(t) for t in rows])
    results.editor.run(exchange.effects)


def _put_one_after_the_other(results: Results, join: Join, context: Context) -> None:
    key = key_of([join])
    with fragment(results.editor, f"all_gather/{key}") as f, tf.device(context.cpu(context.worker)):
        exchange = Exchange(f, context, key)
        parts = exchange.all_to_all("rows", [f.input(join.local[0], join.dtype, join.shape)])
        whole = tf.concat([rows for (rows,) in parts], join.axis)
    results.give(join, [f.name(whole)])
    results.editor.run(exchange.effects)
