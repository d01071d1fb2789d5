"""Traces sparse and ragged tensors so that the batch axis can be followed. The results are the same.

Ragged tensors are reduced by the row of each value if they were built from these rows. TensorFlow stores the start of
each row instead, and recomputes the row of each value by a dozen ops.

Weights of sparse lookups, and masks of sparse entries, get the static length of the entries. Entry k of the weights
belongs to entry k of the ids. A replica whose part of the batch has as many weights as ids pairs them as one device
does. A reshape fails if the numbers differ; TensorFlow's arithmetic may broadcast instead.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf
from tensorflow.python.ops.ragged.row_partition import RowPartition  # the rows of all ragged tensors

from autodist.tf_compat.patches import FROM_ROW_IDS, RAGGED_REDUCE, SPARSE_LOOKUPS, SPARSE_RETAINS, patched


@contextmanager
def reducing_by_rows() -> Iterator[None]:
    """Reduces the rows of ragged tensors by the row of each value while the context is open."""
    made: dict[int, RowPartition] = {}  # by id of their row splits; kept alive, so that no id is reused

    def noted(by_row: Any, cls: type[RowPartition], *args: Any, **kwargs: Any) -> RowPartition:
        partition: RowPartition = by_row(cls, *args, **kwargs)
        made[id(partition.row_splits())] = partition
        return partition

    def reduced(
        reduce_plainly: Any,
        reduce_op: Any,
        unsorted_segment_op: Any,
        rt_input: Any,
        axis: Any,
        keepdims: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        rows = made.get(id(rt_input.row_splits)) if isinstance(rt_input, tf.RaggedTensor) else None
        of_words = any(one is not None for one in (*args, kwargs.get("separator")))
        if rows is None or of_words or rt_input.ragged_rank != 1 or not _is_of_rows(axis, rt_input.shape.rank):
            return reduce_plainly(reduce_op, unsorted_segment_op, rt_input, axis, keepdims, *args, **kwargs)
        with tf.name_scope(kwargs.get("name") or "RaggedReduce"):
            found = unsorted_segment_op(rt_input.values, rows.value_rowids(), rows.nrows())
            return tf.expand_dims(found, 1) if keepdims else found

    with patched({FROM_ROW_IDS: noted, RAGGED_REDUCE: reduced}):
        yield


def _is_of_rows(axis: Any, rank: int | None) -> bool:
    if isinstance(axis, list | tuple) and len(axis) == 1:
        axis = axis[0]
    return isinstance(axis, int) and rank is not None and axis in (1, 1 - rank)


@contextmanager
def pairing_entries() -> Iterator[None]:
    """Gives weights of sparse ids and masks of sparse tensors the length of the entries while the context is open."""

    def paired(lookup: Any, *args: Any, **kwargs: Any) -> Any:
        signature = inspect.signature(lookup)
        ids, weights = [*signature.parameters][1:3]
        bound = signature.bind(*args, **kwargs).arguments
        if weights in bound:
            bound[weights] = _weights_of(bound[ids], bound[weights])
        return lookup(**bound)

    def retained(retain: Any, sp_input: Any, to_retain: Any) -> Any:
        if isinstance(sp_input, tf.SparseTensor):
            to_retain = _of_length(tf.convert_to_tensor(to_retain), sp_input.values)
        return retain(sp_input, to_retain)

    with patched({**dict.fromkeys(SPARSE_LOOKUPS, paired), **dict.fromkeys(SPARSE_RETAINS, retained)}):
        yield


def _weights_of(ids: Any, weights: Any) -> Any:
    kinds = (tf.SparseTensor, tf.RaggedTensor)
    if not isinstance(ids, kinds) or not isinstance(weights, kinds):
        return weights
    return weights.with_values(_of_length(weights.values, ids.values))


def _of_length(values: tf.Tensor, entries: tf.Tensor) -> tf.Tensor:
    if not tf.is_symbolic_tensor(values) or values.shape.rank != 1 or entries.shape.rank != 1:
        return values
    return tf.reshape(values, tf.shape(entries))
