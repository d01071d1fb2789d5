"""All-reduce between workers through queues (SHUFFLE), for tensors whose sum must be identical on every worker."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

import tensorflow as tf

from autodist.compressors import NO_COMPRESSOR, Compressor, Dense
from autodist.errors import StrategyError
from autodist.graph.execution_order import find_execution_order, message_of
from autodist.graph.parts import PendingReduction, ReduceOp
from autodist.graph.step import ReplicatedStep
from autodist.graph.subgraph import SubgraphBuilder, subgraph
from autodist.kernels.base import Context, Kernel
from autodist.kernels.communicate.bucket_reduction import BucketReduction
from autodist.kernels.communicate.buckets import BUCKET_BYTES, Bucket, digest, key_of, make_buckets
from autodist.kernels.communicate.communicator import Communicator, is_direct
from autodist.kernels.communicate.results import Results
from autodist.kernels.communicate.subgroup_communicator import SubgroupCommunicator
from autodist.kernels.plan import Plan
from autodist.kernels.sums import join_rows, ordered_sum
from autodist.placement.group import Group

EVENLY_CUT = 16
"""Buckets have a fixed size for up to this many workers; beyond that they grow, so that their pieces do not shrink."""

EVENLY_CUT_IN_SUBGROUPS = 32
"""The same limit for reduction in subgroups, which needs fewer messages."""


@dataclass(frozen=True)
class ReduceByShuffle(Kernel[ReplicatedStep, ReplicatedStep]):
    """Sums pending reductions over their groups in rank order, so that all workers get the same bits in every run.

    A bucket is cut into one piece per worker of its group. Each piece goes to its owner through one queue per source.
    The owner sums it, divides it by the weight, and sends it to each worker through a queue of that worker. This takes
    two hops and as many bytes as a ring. Small buckets, and all buckets between two workers, are sent uncut to every
    worker, which sums them: one hop, and between two workers no more bytes. Rows are sent uncut too, since their number
    differs. Compressed gradients have separate buckets, which their compressor sums. With one worker nothing is sent or
    compressed.

    If the strategy defines subgroups (for many workers), each subgroup sums first, and the sums are then added in
    subgroup order (`SubgroupCommunicator`). A worker then communicates with about 2·√W others instead of
    W-1. Rows are sent unsummed between subgroups.

    Each element is the sum of the workers' elements in worker order, whatever bucket holds it. Buckets may therefore
    grow with the number of workers, which limits the messages: 2·(W-1) per bucket and worker. Buckets of a compressor
    do not grow, since a compressor may process a bucket or a piece as a whole.

    Attributes:
        bucket_bytes: size at which a bucket is closed; multiplied by W / `EVENLY_CUT` for more than `EVENLY_CUT`
            workers.
    """

    bucket_bytes: int = BUCKET_BYTES
    name: ClassVar[str] = "reduce-by-shuffle"
    after: ClassVar[Mapping[str, str]] = {
        "merge-rows": "rows are merged before they are sent",
        "set-sync-mode": "it removes the reductions of state that stays local",
    }

    def apply(self, step: ReplicatedStep, context: Context) -> ReplicatedStep:
        plan = context.plan
        reductions = [pending for pending in step.reductions if plan.uses_shuffle(pending)]
        if not reductions:
            return step
        results = Results(step)
        stored_as = _names_in_session(step)
        plain, compressed = self._buckets(reductions, context)
        fused, single = find_fused_buckets(step, plain, context)
        for buckets in (*fused, *([bucket] for bucket in single)):
            _reduce(results, buckets, context)
        for bucket, compressor in compressed:
            _compress_bucket(results, bucket, compressor, stored_as, context)
        for pending in reductions:
            if pending.is_sparse:
                _gather_rows(results, pending, context)
            elif pending.merge is ReduceOp.ROWS:
                _concatenate_rows(results, pending, context)
        return results.to_step(reductions)

    def _buckets(
        self, reductions: Iterable[PendingReduction], context: Context
    ) -> tuple[list[Bucket], list[tuple[Bucket, Compressor]]]:
        """Returns the buckets to sum directly, and those that compressors sum."""
        plan = context.plan
        compressors = {pending.name: compressor_of(plan, pending) for pending in reductions}

        def fusion_of(pending: PendingReduction) -> Hashable:
            return plan.fusion_group(pending), compressors[pending.name], context.subgroups(pending) is not None

        dense = [pending for pending in reductions if not pending.is_sparse and pending.merge is not ReduceOp.ROWS]
        plain = [pending for pending in dense if compressors[pending.name] is None]
        at_once = [pending for pending in plain if context.subgroups(pending) is None]
        in_subgroups = [pending for pending in plain if context.subgroups(pending) is not None]
        buckets = [*self._fuse(at_once, plan, EVENLY_CUT), *self._fuse(in_subgroups, plan, EVENLY_CUT_IN_SUBGROUPS)]
        left = make_buckets([j for j in dense if compressors[j.name]], fusion_of, self.bucket_bytes)
        return buckets, [(b, c) for b in left if (c := compressors[b.reductions[0].name])]

    def _fuse(self, reductions: Iterable[PendingReduction], plan: Plan, evenly_cut: int) -> Iterator[Bucket]:
        """Yields buckets whose size grows with the number of workers of their group."""
        by_group: dict[Group, list[PendingReduction]] = {}
        for pending in reductions:
            by_group.setdefault(pending.group, []).append(pending)
        for group, alike in by_group.items():
            limit = self.bucket_bytes * max(len(group.workers), evenly_cut) // evenly_cut
            yield from make_buckets(alike, plan.fusion_group, limit)


@contextmanager
def _communicating(
    results: Results, scope: str, key: str, pending: PendingReduction, context: Context
) -> Iterator[Communicator]:
    """Yields the communicator of a reduction's group, and makes the step run its messages."""
    with subgraph(results.editor, f"{scope}/{key}") as f, tf.device(context.cpu(context.worker)):
        subgroups = context.subgroups(pending)
        exchange = (
            Communicator(f, context, key, pending.group)
            if subgroups is None
            else SubgroupCommunicator(f, context, key, pending.group, subgroups=subgroups)
        )
        yield exchange
    results.editor.run(exchange.effects, pending.outer)


def _reduce(results: Results, buckets: Sequence[Bucket], context: Context) -> None:
    """Reduces a bucket, or several small ones in the same messages."""
    first, *others = buckets
    key = digest(";".join(bucket.key for bucket in buckets)) if others else first.key
    with _communicating(results, "all_reduce", key, first.reductions[0], context) as exchange:
        f = exchange.f
        parts = [[bucket.pack(f), *weight_of(f, bucket.reductions[0])] for bucket in buckets]
        if others:
            wholes = exchange.all_reduce_together(parts, [bucket.merge for bucket in buckets])
        else:
            wholes = [exchange.all_reduce(parts[0], first.merge)]
        values = [bucket.unpack(f, whole) for bucket, whole in zip(buckets, wholes, strict=True)]
    for bucket, tensors in zip(buckets, values, strict=True):
        results.set_values(bucket.reductions, map(f.name, tensors))


def _compress_bucket(
    results: Results, bucket: Bucket, compressor: Compressor, stored_as: Mapping[str, str], context: Context
) -> None:
    with _communicating(results, "all_reduce", bucket.key, bucket.reductions[0], context) as exchange:
        f = exchange.f
        reduction = BucketReduction(f, bucket, exchange, stored_as)
        values = compressor.add_up(reduction)
        reduction.finish(values)
    results.set_values(bucket.reductions, map(f.name, values))
    results.editor.initialize({name: f.name(op) for name, op in reduction.initializers.items()})


def _names_in_session(step: ReplicatedStep) -> dict[str, str]:
    """Maps a variable's name to its name in the session."""
    stored = {n.name: n.attr["shared_name"].s.decode() for n in step.graph_index.of_op("VarHandleOp")}
    return {v.name: stored[v.handle] for v in step.variables if v.handle in stored}


def weight_of(f: SubgraphBuilder, pending: PendingReduction) -> list[tf.Tensor]:
    """Returns the weight that is sent with a reduction, if it has one."""
    return [] if pending.weight is None else [f.input(pending.weight, pending.weight_dtype, [])]


def own_rows(f: SubgraphBuilder, pending: PendingReduction) -> list[tf.Tensor]:
    """Returns this worker's part of a sparse reduction: indices, values and the weight, if it has one."""
    ids = f.input(pending.local[0], pending.index_dtype, [None])
    return [ids, f.input(pending.local[1], pending.dtype, pending.shape), *weight_of(f, pending)]


def rows_of(pending: PendingReduction, parts: list[list[tf.Tensor]]) -> list[tf.Tensor]:
    """Returns the indices and values of all parts; the values are divided by the sum of the weights, if any."""
    ids, values = join_rows(pending.row_join, pending.aligned, [p[0] for p in parts], [p[1] for p in parts])
    if len(parts[0]) == 3:
        values = tf.math.divide_no_nan(values, tf.cast(ordered_sum([p[2] for p in parts]), values.dtype))
    return [ids, values]


def _gather_rows(results: Results, pending: PendingReduction, context: Context) -> None:
    with _communicating(results, "all_gather", key_of([pending]), pending, context) as exchange:
        rows = rows_of(pending, exchange.all_gather("rows", own_rows(exchange.f, pending)))
    results.set_result(pending, [exchange.f.name(t) for t in rows])


def _concatenate_rows(results: Results, pending: PendingReduction, context: Context) -> None:
    with _communicating(results, "all_gather", key_of([pending]), pending, context) as exchange:
        own = exchange.f.input(pending.local[0], pending.dtype, pending.shape)
        whole = tf.concat([rows for (rows,) in exchange.all_gather("rows", [own])], pending.axis)
    results.set_values([pending], [exchange.f.name(whole)])


def compressor_of(plan: Plan, pending: PendingReduction) -> Compressor | None:
    """Returns the compressor of a reduction, or None if it is sent uncompressed.

    Raises:
        StrategyError: the strategy names a compressor that does not support this gradient.
    """
    compressor = plan.compressor(pending)
    if compressor == NO_COMPRESSOR:
        return None
    problem = compressor.misfit(str(pending.variable), pending.is_sparse, pending.dtype.name, pending.dtype.is_floating)
    if problem is not None:
        raise StrategyError(problem)
    return compressor if compressor.saves_bytes(Dense.of(pending)) else None


def find_fused_buckets(
    step: ReplicatedStep, buckets: Sequence[Bucket], context: Context
) -> tuple[list[list[Bucket]], list[Bucket]]:
    """Returns lists of small buckets that are reduced in the same messages, and the remaining buckets, both in order.

    A message costs more than the bytes of a small bucket. Tensors of one message are sent together once all are
    computed. Buckets of one group are therefore fused only if they are of the same communication round: no bucket then
    waits for another one's sum, and no two lists for each other. If owners update variables, a step has more
    communication than its pending reductions, and no buckets are fused.

    Args:
        step: the step.
        buckets: buckets that are summed directly.
        context: the worker for which the step is rewritten.
    """
    small = [bucket for bucket in buckets if is_direct(bucket.spec)]
    if len(small) < 2 or step.synchrony_of:
        return [], list(buckets)
    order = find_execution_order(step.graph_index, step.reductions, {})
    if order is None:
        return [], list(buckets)
    rounds = order.rounds()
    alike: dict[Hashable, list[Bucket]] = {}
    for bucket in small:
        first = bucket.reductions[0]
        together = bucket.group, first.outer, rounds[message_of(first)], context.subgroups(first) is not None
        alike.setdefault(together, []).append(bucket)
    fused = [_join_alike(together) for together in alike.values() if len(together) > 1]
    taken = {id(bucket) for together in alike.values() if len(together) > 1 for bucket in together}
    return fused, [bucket for bucket in buckets if id(bucket) not in taken]


def _join_alike(buckets: Iterable[Bucket]) -> list[Bucket]:
    """Joins the buckets whose vectors can be merged as one."""
    alike: dict[Hashable, tuple[PendingReduction, ...]] = {}
    for bucket in buckets:
        key = bucket.dtype, bucket.weight, bucket.merge
        alike[key] = alike.get(key, ()) + bucket.reductions
    return list(map(Bucket, alike.values()))
