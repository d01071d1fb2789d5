"""Converts sparse and ragged inputs of a step to arrays with a row for each example, which can be split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from autodist.batch.examples import blank
from autodist.errors import CaptureError

Array = NDArray[Any]


@dataclass(frozen=True)
class SparseRows:
    """The arrays of a sparse tensor with a row for each example: a mask, the values, and the indices on each axis.

    Attributes:
        dims: shape of the tensor without the batch axis: numbers, or int64 scalars of the graph.
    """

    dims: tuple[int | tf.Tensor, ...]

    @property
    def arrays_per_tensor(self) -> int:
        """Number of arrays."""
        return 2 + len(self.dims)

    def arrays(self, value: tf.SparseTensor | tf.compat.v1.SparseTensorValue) -> list[Array]:
        """Returns arrays of shape [examples, largest number of entries of an example, ...], padded with zeros."""
        indices, entries = np.asarray(value.indices), np.asarray(value.values)
        order = np.argsort(indices[:, 0], kind="stable")
        lengths = np.bincount(indices[:, 0], minlength=int(value.dense_shape[0]))
        return _padded(lengths, [entries[order], *indices[order, 1:].T])

    def tensor(self, present: tf.Tensor, values: tf.Tensor, *columns: tf.Tensor) -> tf.SparseTensor:
        """Returns the sparse tensor for rows of these arrays."""
        at = tf.where(present)
        columns_found = [at[:, 0], *(tf.gather_nd(column, at) for column in columns)]
        indices = tf.concat([tf.expand_dims(column, 1) for column in columns_found], axis=1)
        rows = tf.shape(present, tf.int64)[0] if present.shape[0] is None else present.shape[0]
        shape = tf.stack([tf.convert_to_tensor(n, tf.int64) for n in (rows, *self.dims)])
        return tf.SparseTensor(indices, tf.gather_nd(values, at), shape)


@dataclass(frozen=True)
class RaggedRows:
    """The arrays of a ragged tensor with a row for each example: a mask, and the values."""

    arrays_per_tensor = 2

    def arrays(self, value: tf.RaggedTensor) -> list[Array]:
        """Returns arrays of shape [examples, length of the longest, ...], padded with zeros."""
        return _padded(value.row_lengths().numpy(), [value.values.numpy()])

    def tensor(self, present: tf.Tensor, values: tf.Tensor) -> tf.RaggedTensor:
        """Returns the ragged tensor for rows of these arrays."""
        at = tf.where(present)
        rows = tf.shape(present, tf.int64)[0]
        return tf.RaggedTensor.from_value_rowids(tf.gather_nd(values, at), at[:, 0], nrows=rows, validate=False)


CompositeRows = SparseRows | RaggedRows


def rows_of(value: object, axis: int | None, whose: str) -> CompositeRows:
    """Returns the conversion of a sparse or ragged tensor to arrays that can be split.

    Args:
        value: the tensor.
        axis: batch axis of the tensor.
        whose: name of the tensor for messages.

    Raises:
        CaptureError: the tensor cannot be split along this axis.
    """
    is_first = axis == 0
    if isinstance(value, tf.SparseTensor) and is_first and value.shape.rank is not None and value.shape.rank > 1:
        return SparseRows(tuple(value.dense_shape.numpy()[1:].tolist()))
    if isinstance(value, tf.RaggedTensor) and is_first and value.ragged_rank == 1:
        return RaggedRows()
    raise CaptureError(_refusal(value, axis, whose))


_DENSE = {
    "SparseTensor": "tf.sparse.to_dense",
    "RaggedTensor": "its to_tensor",
    "IndexedSlices": "tf.convert_to_tensor",
}


def _refusal(value: Any, axis: int | None, whose: str) -> str:
    kind = type(value).__name__
    if axis != 0:
        what = f"{kind}, which is split along its first axis alone, and its batch axis is set to {axis}"
    elif isinstance(value, tf.RaggedTensor):
        what = f"{kind} of {value.ragged_rank} ragged axes, and one with more than one is not split over the replicas"
    elif isinstance(value, tf.SparseTensor):
        what = f"{kind} of rank {value.shape.rank}, which is not split over the replicas"
    else:
        what = f"{kind}, which is not split over the replicas: its arrays do not have a row for each example"
    dense = f"it dense ({_DENSE[kind]})" if kind in _DENSE else "its tensors as separate arguments"
    return (
        f"{whose} is a {what}. Pass {dense}, or set its batch_axis to None, so that every replica gets the whole "
        "tensor."
    )


def open_spec(array: Array) -> tf.TensorSpec:
    """Returns the spec of such an array, with unknown number of examples and unknown length of the longest."""
    return tf.TensorSpec([None, None, *array.shape[2:]], array.dtype)


def _padded(lengths: NDArray[np.int64], arrays: Sequence[Array]) -> list[Array]:
    """Returns a mask of the elements, and the concatenated elements of each array as rows padded to one length."""
    present = np.arange(max(lengths.max(initial=0), 1)) < lengths[:, None]
    padded = []
    for array in arrays:
        rows = blank((*present.shape, *array.shape[1:]), array.dtype)
        rows[present] = array
        padded.append(rows)
    return [present, *padded]
