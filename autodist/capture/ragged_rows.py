"""Reduces ragged tensors by the row of each value, if they were built from these rows.

TensorFlow stores the start of each row and recomputes the row of each value by a dozen ops, through which the batch
axis cannot be followed. The result is the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf
from tensorflow.python.ops.ragged.row_partition import RowPartition  # the rows of all ragged tensors

from autodist.capture.patches import FROM_ROW_IDS, RAGGED_REDUCE, patched


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
