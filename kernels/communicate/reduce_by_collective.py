"""All-reduce between workers by TensorFlow's collectives (RING and NCCL)."""

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
from autodist.graph.step import ReplicatedStep
from autodist.graph.subgraph import SubgraphBuilder, subgraph
from autodist.kernels.base import Context, Kernel
from autodist.kernels.communicate.buckets import BUCKET_BYTES, Bucket, digest, key_of, make_buckets
from autodist.kernels.communicate.reduce_by_shuffle import weight_of
from autodist.kernels.communicate.results import Results
from autodist.kernels.sums import join_rows, reduce_values
from autodist.placement.group import Group

GROUP_KEY = 1
"""The key of the group of all replicas; other groups have larger ones."""

_CARRIERS: Mapping[tf.DType, tf.DType] = {
    **{t: t for t in (tf.float32, tf.float64, tf.int32, tf.int64)},
    **dict.fromkeys((tf.float16, tf.bfloat16), tf.float32),
    **dict.fromkeys((tf.bool, tf.int8, tf.int16, tf.uint8, tf.uint16), tf.int32),
    **dict.fromkeys((tf.uint32, tf.uint64), tf.int64),
}
"""The dtypes for sending. Collectives support few dtypes; a count of examples is exact in 32 bits, not in 16."""

_MOST_ROWS = 2**31 - 1


@dataclass(frozen=True)
class ReduceByCollective(Kernel[ReplicatedStep, ReplicatedStep]):
    """Reduces pending reductions over their groups by TensorFlow's collectives, if the strategy sets RING or NCCL.

    All reductions of the step then use collectives, because collectives hang if the same run uses queues or
    accumulators. A step without strategy (one without gradients, for example) is a separate run and uses queues.
    A bucket is one all-reduce; its weight is appended to the values. Rows are two all-gathers, of indices and of
    values. They are padded to a length that a small all-gather determines first; the padding is then removed, and rows
    are in worker order. A ring sums in the order of its members, so that all workers get the same bits in every run.

    Collectives of a ring run concurrently and may start in a different order on each worker. NCCL collectives must
    start in one order, so each waits for the previous one. The NCCL path follows the interface that TensorFlow
    documents; it has not been run, since that needs GPUs on two workers.

    Attributes:
        bucket_bytes: size at which a bucket is closed.
    """

    bucket_bytes: int = BUCKET_BYTES
    name: ClassVar[str] = "reduce-by-collective"
    after: ClassVar[Mapping[str, str]] = {
        "merge-rows": "rows are merged before they are sent",
        "set-sync-mode": "it removes the reductions of state that stays local",
    }

    def apply(self, step: ReplicatedStep, context: Context) -> ReplicatedStep:
        plan = context.plan
        reductions = step.reductions
        if plan.collective is None or not reductions:
            return step
        _require_types_that_travel(reductions, plan.collective)
        results = Results(step)
        collectives = _Collectives(context, plan.collective)
        dense = [pending for pending in reductions if not pending.is_sparse]
        buckets = make_buckets(dense, plan.fusion_group, self.bucket_bytes)
        rows = [pending for pending in reductions if pending.is_sparse]
        # Reductions of a later round depend on those of earlier rounds, and the reductions that a seed waits for
        # precede those computed from it, in seed order; the single order of NCCL has to agree with that.
        position = {pending.name: k for k, pending in enumerate(reductions)}
        order = find_execution_order(step.graph_index, reductions, {})
        assert order is not None, "the reductions form no cycle"
        rounds = order.rounds()
        everything: list[Bucket | PendingReduction] = [*buckets, *rows]
        for work in sorted(everything, key=lambda work: _order(work, rounds, position)):
            if isinstance(work, Bucket):
                _reduce_bucket(results, work, collectives)
            else:
                _gather_rows(results, work, collectives)
        results.editor.run(collectives.effects)
        return results.to_step(reductions)


def _order(
    work: Bucket | PendingReduction, rounds: Mapping[str, int], position: Mapping[str, int]
) -> tuple[int, int, bool, int, int]:
    pending = work.reductions[0] if isinstance(work, Bucket) else work
    is_late = pending.kind not in (PendingReductionKind.LOSS, PendingReductionKind.WHOLE)
    return rounds[message_of(pending)], pending.level, is_late, pending.depth, 0 if is_late else position[pending.name]


def _require_types_that_travel(reductions: Sequence[PendingReduction], spec: str) -> None:
    for pending in reductions:
        if pending.dtype not in _CARRIERS:
            raise StrategyError(
                f"{pending.name} has dtype {pending.dtype.name}, which TensorFlow's collectives cannot send to other "
                f"workers. Set all_reduce_spec: SHUFFLE instead of {spec}."
            )


@dataclass
class _Collectives:
    """TensorFlow's collectives between the workers of a group, each of which takes part once.

    Attributes:
        context: the worker for which the step is rewritten.
        spec: RING or NCCL.
        effects: names of the collectives added so far. All must run, or other workers would wait for this one.
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
        """The device of this worker's collectives: its CPU for a ring, the GPU of its first replica for NCCL."""
        if not self.is_nccl:
            return self.context.cpu(self.context.worker)
        first = self.context.replicas[self.context.local_replicas[0]].device
        return f"{self.context.task(self.context.worker)}/device:{first.upper()}"

    def key(self, description: str) -> int:
        """Returns an instance key: positive, the same on all workers, and unique in this step.

        Args:
            description: the tensor with its dtype and length. An instance is bound to these for the lifetime
                of the servers.
        """
        instance_key, salt = 0, 0
        while instance_key == 0 or instance_key in self._keys:
            instance_key = int.from_bytes(hashlib.sha256(f"{description}/{salt}".encode()).digest()[:4]) % 2**31
            salt += 1
        self._keys.add(instance_key)
        return instance_key

    def reduce(self, f: SubgraphBuilder, group: Group, vector: tf.Tensor, description: str) -> tf.Tensor:
        """Sums the vectors of a group's workers, which have equal, nonzero lengths."""
        with self._in_order(f):
            total = tf.raw_ops.CollectiveReduceV2(
                input=vector, instance_key=self.key(f"{description}/{vector.dtype.name}/{vector.shape}"),
                merge_op="Add", final_op="Id", **self._members(group),
            )  # fmt: skip
        self.effects.append(f.name(total.op))
        return total

    def gather(self, f: SubgraphBuilder, group: Group, vector: tf.Tensor, key: int | tf.Tensor) -> tf.Tensor:
        """Concatenates the vectors of a group's workers, which have equal, nonzero lengths."""
        with self._in_order(f):
            whole = tf.raw_ops.CollectiveGatherV2(input=vector, instance_key=key, **self._members(group))
        self.effects.append(f.name(whole.op))
        return whole

    def _members(self, group: Group) -> dict[str, object]:
        return {
            "group_size": len(group.workers),
            "group_key": _group_key(group),
            "ordering_token": [],
            "communication_hint": self.spec.lower(),
        }

    def _in_order(self, f: SubgraphBuilder) -> AbstractContextManager[object]:
        return tf.control_dependencies([f.after(self.effects[-1:])] if self.is_nccl and self.effects else [])


def _group_key(group: Group) -> int:
    """Returns a key that is the same on all workers of a group, and differs between the groups of a run."""
    return GROUP_KEY if group.is_all else GROUP_KEY + 1 + int(digest(group.key), 16) % 2**30


def _reduce_bucket(results: Results, bucket: Bucket, collectives: _Collectives) -> None:
    length = sum(bucket.lengths)
    if length == 0:  # an empty collective crashes the process
        for pending in bucket.reductions:
            results.set_result(pending, pending.local)
        return
    carrier = _CARRIERS[bucket.dtype]
    with subgraph(results.editor, f"all_reduce/{bucket.key}") as f, tf.device(collectives.device):
        weight = [tf.reshape(tf.cast(w, carrier), [1]) for w in weight_of(f, bucket.reductions[0])]
        total = _merged(f, collectives, bucket, bucket.pack(f, carrier, weight))
        if weight:
            total = tf.math.divide_no_nan(total[:length], total[length])
        values = bucket.unpack(f, tf.cast(total, bucket.dtype))
    results.set_values(bucket.reductions, map(f.name, values))


def _merged(f: SubgraphBuilder, collectives: _Collectives, bucket: Bucket, vector: tf.Tensor) -> tf.Tensor:
    """Merges the workers' vectors: sums by an all-reduce, other operations by an all-gather."""
    if bucket.merge is ReduceOp.ADD:
        return collectives.reduce(f, bucket.group, vector, bucket.key)
    description = f"{bucket.key}/{vector.dtype.name}/{vector.shape}"
    whole = collectives.gather(f, bucket.group, vector, collectives.key(description))
    return reduce_values(tf.unstack(tf.reshape(whole, [len(bucket.group.workers), sum(bucket.lengths)])), bucket.merge)


def _gather_rows(results: Results, pending: PendingReduction, collectives: _Collectives) -> None:
    key, group = key_of([pending]), pending.group
    with subgraph(results.editor, f"all_gather/{key}") as f, tf.device(collectives.device):
        ids = f.input(pending.local[0], pending.index_dtype, [None])
        values = f.input(pending.local[1], pending.dtype, pending.shape)
        # The number of rows and the weight are sent together; both are exact in float64.
        counts = [tf.cast(x, tf.float64) for x in (tf.size(ids, out_type=tf.int64), *weight_of(f, pending))]
        gathered = tf.reshape(
            collectives.gather(f, group, tf.stack(counts), collectives.key(f"{key}/sizes/{len(counts)}")),
            [len(group.workers), len(counts)],
        )
        sizes = tf.unstack(tf.cast(gathered[:, 0], tf.int64))
        all_ids = _gather_padded(f, collectives, group, f"{key}/indices", ids, sizes)
        all_values = _gather_padded(f, collectives, group, f"{key}/values", values, sizes)
        whole_ids, whole_values = join_rows(pending.row_join, pending.aligned, all_ids, all_values)
        if pending.weight is not None:
            # Not add_n: it starts with any input whose memory it can reuse, so its order differs between workers.
            total = tf.reduce_sum(gathered[:, 1])
            whole_values = tf.math.divide_no_nan(whole_values, tf.cast(total, pending.dtype))
        whole_values.set_shape(pending.shape)
    results.set_result(pending, [f.name(whole_ids), f.name(whole_values)])


def _gather_padded(
    f: SubgraphBuilder,
    collectives: _Collectives,
    group: Group,
    description: str,
    rows: tf.Tensor,
    sizes: Sequence[tf.Tensor],
) -> list[tf.Tensor]:
    """Returns the rows of each worker of a group; the worker of rank `k` has `sizes[k]` rows.

    A collective keeps the length of its first run. Each length therefore has its own key, and lengths are rounded up so
    that there are few of them.
    """
    lengths = padded_lengths()
    carrier = _CARRIERS[rows.dtype]
    row = tf.shape(rows, out_type=tf.int64)[1:]
    elements = tf.reduce_prod(row)
    position = tf.searchsorted(tf.constant(lengths, tf.int64), [tf.reduce_max(tf.stack(sizes))])[0]
    length = tf.gather(tf.constant(lengths, tf.int64), position)
    keys = [collectives.key(f"{description}/{carrier.name}/{n}") for n in lengths]
    flat = tf.reshape(tf.cast(rows, carrier), [-1])
    padded = tf.pad(flat, [[0, length * elements - tf.size(flat, out_type=tf.int64)]])
    whole = collectives.gather(f, group, padded, tf.gather(tf.constant(keys, tf.int32), position))
    whole = tf.reshape(tf.cast(whole, rows.dtype), tf.concat([[length * len(sizes)], row], 0))
    return [whole[w * length : w * length + size] for w, size in enumerate(sizes)]


def padded_lengths() -> list[int]:
    """Returns the lengths to which rows are padded, each at most a quarter more than the previous one, or one more."""
    lengths = [1]
    while lengths[-1] < _MOST_ROWS:
        lengths.append(min(_MOST_ROWS, max(lengths[-1] + 1, lengths[-1] * 5 // 4)))
    return lengths
