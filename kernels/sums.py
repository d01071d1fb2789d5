"""Sums whose bits do not vary between runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import tensorflow as tf

from autodist.graph.parts import ReduceOp, RowJoin


def ordered_sum(parts: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns the sum of tensors of one shape, added in order.

    `tf.add_n` starts with any input whose buffer it can reuse, and TensorFlow's optimizer turns a chain of additions
    into an `add_n`. With three or more terms, both differ in the last bits between workers and between runs.
    """
    if len(parts) == 1:
        return parts[0]
    if len(parts) == 2:  # addition of two terms is commutative
        return tf.raw_ops.AddV2(x=parts[0], y=parts[1])
    return tf.reduce_sum(tf.stack(parts), 0)


def sum_of_sums(parts: Sequence[tf.Tensor], groups: int) -> tf.Tensor:
    """Returns the sum of tensors of one shape; each of `groups` equal runs of consecutive tensors is added first."""
    size = len(parts) // groups
    return ordered_sum([ordered_sum(parts[start : start + size]) for start in range(0, len(parts), size)])


def reduce_values(parts: Sequence[tf.Tensor], how: ReduceOp) -> tf.Tensor:
    """Returns the sum of tensors of one shape, added in order, or their elementwise maximum, minimum or product."""
    if how is ReduceOp.ADD:
        return ordered_sum(parts)
    if len(parts) == 1:
        return parts[0]
    together, is_truth = tf.stack(parts), parts[0].dtype.is_bool
    if how is ReduceOp.MAX:
        return tf.reduce_any(together, 0) if is_truth else tf.reduce_max(together, 0)
    if how is ReduceOp.MIN:
        return tf.reduce_all(together, 0) if is_truth else tf.reduce_min(together, 0)
    return tf.reduce_prod(together, 0)


def reduce_parts(parts: Iterable[Sequence[tf.Tensor]], how: ReduceOp = ReduceOp.ADD) -> list[tf.Tensor]:
    """Reduces parts, each a value and optionally its weight, to one such part."""
    parts = list(parts)
    weight = [ordered_sum([p[1] for p in parts])] if len(parts[0]) > 1 else []
    return [reduce_values([p[0] for p in parts], how), *weight]


def reduce_to_mean(parts: Iterable[Sequence[tf.Tensor]], how: ReduceOp = ReduceOp.ADD) -> tf.Tensor:
    """Returns the parts' sum divided by the sum of their weights, if they have any; `how` selects another reduction."""
    parts = list(parts)
    total = reduce_values([p[0] for p in parts], how)
    if len(parts[0]) == 1:
        return total
    return tf.math.divide_no_nan(total, tf.cast(ordered_sum([p[1] for p in parts]), total.dtype))


def identity_like(value: tf.Tensor, how: ReduceOp) -> tf.Tensor:
    """Returns the identity element of a reduction, in the shape of `value`: the part of a replica without examples."""
    if how is ReduceOp.ADD:
        return tf.zeros_like(value)
    if how is ReduceOp.PRODUCT:
        return tf.ones_like(value)
    least, most = (False, True) if value.dtype.is_bool else (value.dtype.min, value.dtype.max)
    if value.dtype.is_floating:
        least, most = -float("inf"), float("inf")
    return tf.fill(tf.shape(value), tf.constant(least if how is ReduceOp.MAX else most, value.dtype))


def rows_of_examples(ids: tf.Tensor, values: tf.Tensor, size: tf.Tensor, aligned: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the indices and values of the rows that a replica contributes to a sparse gradient.

    A replica without examples computes on a placeholder row, so it keeps only the rows that all replicas have.

    Args:
        ids: row indices, as the replica computed them.
        values: rows, as the replica computed them.
        size: number of examples of the replica.
        aligned: number of trailing rows that are aligned.
    """
    zero, one = tf.constant([0]), tf.constant([1])
    start = tf.where(size > 0, zero, tf.size(ids) - aligned if aligned else tf.size(ids))
    kept = [
        tf.raw_ops.StridedSlice(input=rows, begin=start, end=zero, strides=one, end_mask=1) for rows in (ids, values)
    ]
    return kept[0], kept[1]


def join_rows(
    how: RowJoin, aligned: int, ids: Sequence[tf.Tensor], values: Sequence[tf.Tensor]
) -> tuple[tf.Tensor, tf.Tensor]:
    """Joins the indices and values of several parts of a sparse gradient.

    Args:
        how: the rule that combines the parts.
        aligned: number of trailing rows that are aligned, if only these are.
        ids: row indices of each part.
        values: rows of each part.
    """
    if len(ids) == 1:
        return ids[0], values[0]
    if how is RowJoin.ALIGNED:
        return ids[0], ordered_sum(values)
    if how is RowJoin.ENDS_ALIGNED:
        first_ids, first = [i[:-aligned] for i in ids], [v[:-aligned] for v in values]
        last = ordered_sum([v[-aligned:] for v in values])
        return tf.concat([*first_ids, ids[0][-aligned:]], 0), tf.concat([*first, last], 0)
    all_ids, all_values = tf.concat(ids, 0), tf.concat(values, 0)
    if how is RowJoin.IN_TURN:
        return all_ids, all_values
    unique, segment = tf.unique(all_ids, out_idx=tf.int32)
    return unique, tf.math.unsorted_segment_sum(all_values, segment, tf.size(unique))
