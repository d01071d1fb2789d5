"""Rows of replicas: their concatenation, and each replica's slice of rows summed over all replicas."""

from __future__ import annotations

import tensorflow as tf

from autodist.graph.parts import PendingReduction, PendingReductionKind, ReduceOp
from autodist.graph.subgraph import SubgraphBuilder, subgraph
from autodist.kernels.replicate.reductions.reducer import Reducer
from autodist.kernels.replicate.weights import ReplicaWeights
from autodist.kernels.sums import ordered_sum


def concatenated(reducer: Reducer, label: str, name: str, axis: int) -> str:
    """Concatenates the rows of the local replicas."""
    with subgraph(reducer.editor, label) as f:
        count = 1 if name in reducer.step.inputs else reducer.count  # fed inputs hold the rows of all replicas
        values = [reducer.parts.tensor(f, name, k) for k in range(count)]
        if reducer.parts.sizes is not None:
            values = [_true_rows(f, reducer.parts, v, axis, k) for k, v in enumerate(values)]
        whole = tf.concat(values, axis) if len(values) > 1 else values[0]
    return f.name(whole)


def _true_rows(f: SubgraphBuilder, parts: ReplicaWeights, value: tf.Tensor, axis: int, k: int) -> tf.Tensor:
    """Returns a replica's rows; none if it has no examples and computed on a placeholder row."""
    rows = _number_of(f, parts, value, axis, k)
    if value.shape.rank is None:
        return value[(slice(None),) * axis + (slice(rows),)]
    return tf.slice(value, tf.zeros([value.shape.rank], tf.int64), _lengths(value, axis, rows))


def _number_of(f: SubgraphBuilder, parts: ReplicaWeights, value: tf.Tensor, axis: int, k: int) -> tf.Tensor:
    return tf.shape(value, out_type=tf.int64)[axis] * tf.cast(parts.is_used(f, k), tf.int64)


def _cut(value: tf.Tensor, axis: int, start: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
    begin = [start if a == axis else tf.constant(0, tf.int64) for a in range(value.shape.rank)]
    return tf.slice(value, tf.stack(begin), _lengths(value, axis, rows))


def _lengths(value: tf.Tensor, axis: int, rows: tf.Tensor) -> tf.Tensor:
    """Returns the lengths of a slice of `rows` rows that covers all other axes."""
    return tf.stack([rows if a == axis else tf.constant(-1, tf.int64) for a in range(value.shape.rank)])


class GatheredRows:
    """The rows of one tensor, gathered from all replicas; and for each replica its rows of a sum over all replicas.

    All replicas read the same gathered rows, so the gradient of a replica's rows is the sum of the gradients that all
    replicas have for them.

    Args:
        reducer: of the replicated graph.
        name: of the reductions.
        captured: the tensor with the rows.
        axis: of the rows.
        depth: the communication round that gathers them.
        is_of_all: True: over the replicas of all workers; False: over the local ones.
    """

    def __init__(self, reducer: Reducer, name: str, captured: str, axis: int, depth: int, is_of_all: bool) -> None:
        self._reducer, self._name, self._captured, self._axis = reducer, name, captured, axis
        self._depth, self._is_of_all = depth, is_of_all
        self._counts: str | None = None

    def gathered(self, name: str, captured: str, depth: int) -> str:
        """Returns the rows of all replicas."""
        spec = self._reducer.step.spec_of(captured)
        shape = [None if a == self._axis else length for a, length in enumerate(spec.shape)]
        local = concatenated(self._reducer, f"{name}/local", captured, self._axis)
        return self._of_workers(name, local, spec.dtype, shape, self._axis, depth, self._reducer.level(captured))

    def own(self, name: str, captured: str, depth: int) -> list[str]:
        """Returns, for each local replica, its rows of the sum of all replicas' values for all rows."""
        reducer, spec = self._reducer, self._reducer.step.spec_of(captured)
        with subgraph(reducer.editor, f"{name}/local") as f:
            values = [reducer.kept(f, reducer.parts.tensor(f, captured, k), k) for k in range(reducer.count)]
            added = ordered_sum(values)[tf.newaxis]
        shape = [None, *(None if a == self._axis else length for a, length in enumerate(spec.shape))]
        level = reducer.level(captured)
        by_worker = self._of_workers(name, f.name(added), spec.dtype, shape, 0, depth, level)
        counts = self._numbers_of_rows()
        with subgraph(reducer.editor, f"{name}/own") as f:
            whole = tf.reduce_sum(f.input(by_worker, spec.dtype, shape), 0)
            starts = tf.cumsum(f.input(counts, tf.int64, [None]), exclusive=True)
            made = [self._cut_for(f, whole, starts, k) for k in range(reducer.count)]
        return [f.name(rows) for rows in made]

    def _cut_for(self, f: SubgraphBuilder, whole: tf.Tensor, starts: tf.Tensor, k: int) -> tf.Tensor:
        """Returns the rows of one local replica; zeros for the placeholder row of a replica without examples."""
        reducer = self._reducer
        local_rows = reducer.parts.tensor(f, self._captured, k)
        rows = tf.shape(local_rows, out_type=tf.int64)[self._axis]
        last = tf.shape(whole, out_type=tf.int64)[self._axis] - rows
        start = tf.minimum(starts[reducer.context.copied_replicas[k]], last)
        cut = tf.ensure_shape(_cut(whole, self._axis, start, rows), local_rows.shape)
        return reducer.kept(f, cut, k)

    def _numbers_of_rows(self) -> str:
        """Returns the number of rows of each replica, in the order of the replicas."""
        if self._counts is None:
            reducer, name = self._reducer, f"{self._name}/rows"
            with subgraph(reducer.editor, f"{name}/local") as f:
                values = [reducer.parts.tensor(f, self._captured, k) for k in range(reducer.count)]
                local = tf.stack([_number_of(f, reducer.parts, v, self._axis, k) for k, v in enumerate(values)])
            level = reducer.level(self._captured)
            self._counts = self._of_workers(name, f.name(local), tf.int64, [None], 0, self._depth, level)
        return self._counts

    def _of_workers(
        self, name: str, local: str, dtype: tf.DType, shape: list[int | None], axis: int, depth: int, level: int
    ) -> str:
        if not self._is_of_all:
            return local
        with subgraph(self._reducer.editor, name) as f:
            value = f.input(local, dtype, shape)
            if self._reducer.group.spans_workers:
                # Rows of other workers follow. Shape inference must not find the length of this worker's.
                result = tf.compat.v1.placeholder_with_default(value, shape)
            else:
                result = tf.identity(value)
        self._reducer.note(
            PendingReduction(
                name=name, kind=PendingReductionKind.WHOLE, local=(local,), result=(f.name(result),), weight=None,
                level=level, dtype=dtype, shape=tf.TensorShape(shape),
                group=self._reducer.group, merge=ReduceOp.ROWS, axis=axis, depth=depth,
            )
        )  # fmt: skip
        return f.name(result)
