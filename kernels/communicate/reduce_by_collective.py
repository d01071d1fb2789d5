"""All-reduce between workers: RING and NCCL, by TensorFlow's collectives."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import ClassVar

import tensorflow as tf

from autodist.errors import StrategyError
from autodist.graph.execution_order import find_execution_order, message_of
from autodist.graph.parts import PendingReduction, PendingReductionKind, ReduceOp
from autodist.graph.step import Step
from autodist.graph.subgraph import SubgraphBuilder, subgraph
from autodist.kernels.base import Context, Kernel
from autodist.kernels.communicate.buckets import BUCKET_BYTES, Bucket, key_of, make_buckets
from autodist.kernels.communicate.reduce_by_shuffle import weight_of
from autodist.kernels.communicate.results import Results
from autodist.kernels.sums import merged, rows_together

GROUP_KEY = 1
"""All workers, one member each: the only group there is."""

_CARRIERS: Mapping[tf.DType, tf.DType] = {
    **{t: t for t in (tf.float32, tf.float64, tf.int32, tf.int64)},
    **dict.fromkeys((tf.float16, tf.bfloat16), tf.float32),
    **dict.fromkeys((tf.bool, tf.int8, tf.int16, tf.uint8, tf.uint16), tf.int32),
    **dict.fromkeys((tf.uint32, tf.uint64), tf.int64),
}
"""As what values of a type travel. Collectives know few types; a count of examples is exact in 32 bits, not in 16."""

_MOST_ROWS = 2**31 - 1


@dataclass(frozen=True)
class ReduceByCollective(Kernel):
    """Sums joins over the workers by TensorFlow's collectives, where the strategy says RING or NCCL.

    Then all joins of the step travel so, because collectives hang beside queues and accumulators of the same run;
    another step, which the strategy does not concern (one without gradients, say), is another run and uses queues. A
    bucket is one all-reduce, in which its weight travels behind the values. Rows are two all-gathers, of indices and
    of values, padded to one length that a first small one agrees on; the padding is taken out again, and the rows
    stand in the order of the workers. A ring adds in the order of its members, so that all workers get the same bits in
    every run.

    Collectives of a ring run at the same time and may begin in another order on each worker. Those of NCCL have to
    begin in one order, so each waits for the one before. NCCL is written to the interface that TensorFlow documents
    and has not been run: that takes GPUs on two workers.

    Attributes:
        bucket_bytes: size at which a bucket is closed.
    """

    bucket_bytes: int = BUCKET_BYTES
    name: ClassVar[str] = "reduce-by-collective"

    def apply(self, item: Step, context: Context) -> Step:
        plan, replication = context.plan, item.replication
        if plan.collective is None or replication is None:
            return item
        joins = replication.joins
        _require_types_that_travel(joins, plan.collective)
        results = Results(item, replication)
        group = _Group(context, plan.collective)
        dense = [join for join in joins if not join.is_sparse]
        buckets = make_buckets(dense, plan.group, self.bucket_bytes)
        rows = [join for join in joins if join.is_sparse]
        # What a later stage reduces needs what an earlier one has reduced, and what a seed waits for comes before what
        # is made of it, in the order of the seeds; NCCL's one order has to agree with that.
        position = {join.name: k for k, join in enumerate(joins)}
        order = find_execution_order(item.graph_index, joins, {})
        assert order is not None, "the depths of joins are settled"
        rounds = order.rounds()
        everything: list[Bucket | PendingReduction] = [*buckets, *rows]
        for work in sorted(everything, key=lambda work: _order(work, rounds, position)):
            if isinstance(work, Bucket):
                _reduce_bucket(results, work, group)
            else:
                _gather_rows(results, work, group)
        results.editor.run(group.effects)
        return results.to_item(joins)


def _order(
    work: Bucket | PendingReduction, rounds: Mapping[str, int], position: Mapping[str, int]
) -> tuple[int, int, bool, int, int]:
    join = work.joins[0] if isinstance(work, Bucket) else work
    is_late = join.kind not in (PendingReductionKind.LOSS, PendingReductionKind.WHOLE)
    return rounds[message_of(join)], join.level, is_late, join.depth, 0 if is_late else position[join.name]


def _require_types_that_travel(joins: Sequence[PendingReduction], spec: str) -> None:
    for join in joins:
        if join.dtype not in _CARRIERS:
            raise StrategyError(
                f"{join.name} is {join.dtype.name}, which TensorFlow's collectives do not bring to other workers; take "
                f"all_reduce_spec SHUFFLE in place of {spec}."
            )


@dataclass
class _Group:
    """The workers as members of TensorFlow's collectives.

    Attributes:
        context: for whom the graph is rewritten.
        spec: RING or NCCL.
        effects: names of the collectives made so far; all have to run, or other workers would wait for this one.
    """

    context: Context
    spec: str
    effects: list[str] = field(default_factory=list)
    _keys: set[int] = field(default_factory=set)

    @property
    def is_nccl(self) -> bool:
        return self.spec == "NCCL"

    @property
    def device(self) -> str:
        """Where this worker's collectives run: a ring on its CPU, NCCL on the GPU of its first replica."""
        if not self.is_nccl:
            return self.context.cpu(self.context.worker)
        first = self.context.replicas[self.context.local_replicas[0]].device
        return f"{self.context.task(self.context.worker)}/device:{first.upper()}"

    def key(self, told: str) -> int:
        """An instance key: positive, the same on all workers, no other's in this step.

        Args:
            told: what travels, with its type and length: an instance is bound to these for as long as the servers live.
        """
        made, salt = 0, 0
        while made == 0 or made in self._keys:
            made = int.from_bytes(hashlib.sha256(f"{told}/{salt}".encode()).digest()[:4]) % 2**31
            salt += 1
        self._keys.add(made)
        return made

    def reduce(self, f: SubgraphBuilder, vector: tf.Tensor, told: str) -> tf.Tensor:
        """The sum of all workers' vectors, which are of one length and not empty."""
        with self._in_order(f):
            total = tf.raw_ops.CollectiveReduceV2(
                input=vector, instance_key=self.key(f"{told}/{vector.dtype.name}/{vector.shape}"),
                merge_op="Add", final_op="Id", **self._members,
            )  # fmt: skip
        self.effects.append(f.name(total.op))
        return total

    def gather(self, f: SubgraphBuilder, vector: tf.Tensor, key: int | tf.Tensor) -> tf.Tensor:
        """All workers' vectors, which are of one length and not empty, one after the other."""
        with self._in_order(f):
            whole = tf.raw_ops.CollectiveGatherV2(input=vector, instance_key=key, **self._members)
        self.effects.append(f.name(whole.op))
        return whole

    @property
    def _members(self) -> dict[str, object]:
        return {
            "group_size": self.context.workers,
            "group_key": GROUP_KEY,
            "ordering_token": [],
            "communication_hint": self.spec.lower(),
        }

    def _in_order(self, f: SubgraphBuilder) -> AbstractContextManager[object]:
        return tf.control_dependencies([f.after(self.effects[-1:])] if self.is_nccl and self.effects else [])


def _reduce_bucket(results: Results, bucket: Bucket, group: _Group) -> None:
    length = sum(bucket.lengths)
    if length == 0:  # a collective of nothing ends the process
        for join in bucket.joins:
            results.give(join, join.local)
        return
    carrier = _CARRIERS[bucket.dtype]
    with subgraph(results.editor, f"all_reduce/{bucket.key}") as f, tf.device(group.device):
        weight = [tf.reshape(tf.cast(w, carrier), [1]) for w in weight_of(f, bucket.joins[0])]
        total = _merged(f, group, bucket, bucket.pack(f, carrier, weight))
        if weight:
            total = tf.math.divide_no_nan(total[:length], total[length])
        values = bucket.unpack(tf.cast(total, bucket.dtype))
    for join, value in zip(bucket.joins, values, strict=True):
        results.give(join, [f.name(value)])


def _merged(f: SubgraphBuilder, group: _Group, bucket: Bucket, vector: tf.Tensor) -> tf.Tensor:
    """All workers' vectors merged: their sum by an all-reduce, anything else from an all-gather."""
    if bucket.merge is ReduceOp.ADD:
        return group.reduce(f, vector, bucket.key)
    told = f"{bucket.key}/{vector.dtype.name}/{vector.shape}"
    whole = group.gather(f, vector, group.key(told))
    return merged(tf.unstack(tf.reshape(whole, [group.context.workers, sum(bucket.lengths)])), bucket.merge)


def _gather_rows(results: Results, join: PendingReduction, group: _Group) -> None:
    key = key_of([join])
    with subgraph(results.editor, f"all_gather/{key}") as f, tf.device(group.device):
        ids = f.input(join.local[0], join.index_dtype, [None])
        values = f.input(join.local[1], join.dtype, join.shape)
        # Number of rows and weight travel together; both are exact in float64.
        said = [tf.cast(x, tf.float64) for x in (tf.size(ids, out_type=tf.int64), *weight_of(f, join))]
        heard = tf.reshape(
            group.gather(f, tf.stack(said), group.key(f"{key}/sizes/{len(said)}")), [group.context.workers, len(said)]
        )
        sizes = tf.unstack(tf.cast(heard[:, 0], tf.int64))
        all_ids = _gather_padded(f, group, f"{key}/indices", ids, sizes)
        all_values = _gather_padded(f, group, f"{key}/values", values, sizes)
        whole_ids, whole_values = rows_together(join.row_join, join.aligned, all_ids, all_values)
        if join.weight is not None:
            # Not add_n: that starts with whichever input's memory it may reuse, so its order differs between workers.
            total = tf.reduce_sum(heard[:, 1])
            whole_values = tf.math.divide_no_nan(whole_values, tf.cast(total, join.dtype))
        whole_values.set_shape(join.shape)
    results.give(join, [f.name(whole_ids), f.name(whole_values)])


def _gather_padded(
    f: SubgraphBuilder, group: _Group, told: str, rows: tf.Tensor, sizes: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """The rows of each worker, of which worker `w` has `sizes[w]`.

    A collective keeps the length of its first run for ever, so that each length has a key of its own, and lengths are
    rounded up to few.
    """
    lengths = padded_lengths()
    carrier = _CARRIERS[rows.dtype]
    row = tf.shape(rows, out_type=tf.int64)[1:]
    elements = tf.reduce_prod(row)
    position = tf.searchsorted(tf.constant(lengths, tf.int64), [tf.reduce_max(tf.stack(sizes))])[0]
    length = tf.gather(tf.constant(lengths, tf.int64), position)
    keys = [group.key(f"{told}/{carrier.name}/{n}") for n in lengths]
    flat = tf.reshape(tf.cast(rows, carrier), [-1])
    padded = tf.pad(flat, [[0, length * elements - tf.size(flat, out_type=tf.int64)]])
    whole = group.gather(f, padded, tf.gather(tf.constant(keys, tf.int32), position))
    whole = tf.reshape(tf.cast(whole, rows.dtype), tf.concat([[length * len(sizes)], row], 0))
    return [whole[w * length : w * length + size] for w, size in enumerate(sizes)]


def padded_lengths() -> list[int]:
    """The numbers of rows that rows are padded to: each at most a quarter more than the one before, or one more."""
    lengths = [1]
    while lengths[-1] < _MOST_ROWS:
        lengths.append(min(_MOST_ROWS, max(lengths[-1] + 1, lengths[-1] * 5 // 4)))
    return lengths
