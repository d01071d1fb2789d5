"""Sparse placeholders of a session's graph: they are fed as arrays with a row for each example, which can be split."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from autodist.batch.composite_rows import SparseRows
from autodist.errors import CaptureError
from autodist.tf_compat.patches import SPARSE_PLACEHOLDERS, patched


@dataclass(frozen=True)
class SparsePlaceholder:
    """The placeholders that stand for a sparse one.

    Attributes:
        name: its name.
        rows: converts values.
        values: the values of the sparse tensor.
        arrays: the placeholders of a mask, the values and the indices on each axis but the first.
        lengths: those of the lengths that the script has left open, by axis.
    """

    name: str
    rows: SparseRows
    values: tf.Tensor
    arrays: Sequence[tf.Tensor]
    lengths: Mapping[int, tf.Tensor]

    def feeds(self, value: Any) -> dict[tf.Tensor, Any]:
        """Returns the values of the placeholders.

        Args:
            value: a sparse tensor, a `SparseTensorValue`, or a tuple of its three parts.

        Raises:
            CaptureError: the value has another rank.
        """
        sparse = tf.compat.v1.SparseTensorValue(*value) if isinstance(value, tuple | list) else value
        shape, rank = np.asarray(sparse.dense_shape), 1 + len(self.rows.dims)
        if len(shape) != rank:
            raise CaptureError(
                f"{self.name} is fed with a sparse tensor of rank {len(shape)}, and has rank {rank}, that of a sparse "
                f"placeholder without a shape: pass shape={[None] * len(shape)} to tf.compat.v1.sparse_placeholder."
            )
        fed = dict(zip(self.arrays, self.rows.arrays(sparse), strict=True))
        return {**fed, **{length: shape[axis] for axis, length in self.lengths.items()}}


_made: weakref.WeakKeyDictionary[tf.Graph, dict[str, SparsePlaceholder]] = weakref.WeakKeyDictionary()
"""By name, which is that of a name scope."""


@contextmanager
def sparse_placeholders_of_rows() -> Iterator[None]:
    """Makes sparse placeholders that can be split while the context is open; those without a shape have two axes.

    TensorFlow's own are fed with arrays of the entries of all examples.
    """

    def make(plain: Any, dtype: Any, shape: Any = None, name: str | None = None) -> tf.SparseTensor:
        lengths = _lengths(shape)
        return plain(dtype, shape, name) if lengths is None else _placeholder(tf.as_dtype(dtype), lengths, name)

    with patched(dict.fromkeys(SPARSE_PLACEHOLDERS, make)):
        yield


def _lengths(shape: Any) -> list[int | None] | None:
    """Returns the lengths of a sparse placeholder's axes; None if there is one axis, or the graph computes them."""
    if shape is None:
        return [None, None]
    if isinstance(shape, tf.Tensor):
        shape = tf.get_static_value(shape)
    if shape is None:
        return None
    static = shape if isinstance(shape, tf.TensorShape) else tf.TensorShape([None if n == -1 else n for n in shape])
    return static.as_list() if static.rank is not None and static.rank > 1 else None


def _placeholder(dtype: tf.DType, lengths: Sequence[int | None], name: str | None) -> tf.SparseTensor:
    of_rows = [lengths[0], None]
    with tf.name_scope(name or "Placeholder") as scope:
        arrays = [
            tf.compat.v1.placeholder(tf.bool, of_rows, "present"),
            tf.compat.v1.placeholder(dtype, of_rows, "row_values"),
            *(tf.compat.v1.placeholder(tf.int64, of_rows, "row_indices") for _ in lengths[1:]),
        ]
        opened = [axis for axis, length in enumerate(lengths) if axis and length is None]
        open_lengths = {axis: tf.compat.v1.placeholder(tf.int64, [], "length") for axis in opened}
        rows = SparseRows(tuple(open_lengths.get(axis, length) for axis, length in enumerate(lengths) if axis))
        sparse = rows.tensor(*arrays)
    made = SparsePlaceholder(scope.rstrip("/"), rows, sparse.values, arrays, open_lengths)
    _made.setdefault(sparse.values.graph, {})[made.name] = made
    return sparse


def placeholder_of(tensor: Any) -> SparsePlaceholder | None:
    """Returns the sparse placeholder of a sparse tensor, or of a tensor that is fed for it; None for others."""
    of = tensor.values if isinstance(tensor, tf.SparseTensor) else tensor
    if not isinstance(of, tf.Tensor):
        return None
    found = _made.get(of.graph, {}).get(of.op.name.rpartition("/")[0])
    return found if found is not None and any(of is one for one in (found.values, *found.arrays)) else None


def fed_by_rows(feeds: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """Returns feeds without sparse placeholders, whose values are fed as arrays.

    Raises:
        CaptureError: such a value has another rank.
    """
    if not any(isinstance(key, tf.SparseTensor) for key in feeds):
        return feeds
    found: dict[Any, Any] = {}
    for key, value in feeds.items():
        sparse = placeholder_of(key)
        found |= {key: value} if sparse is None else sparse.feeds(value)
    return found


def name_in_batch_axis(tensor: tf.Tensor) -> str:
    """Returns the name of a fed tensor as a key of `batch_axis`."""
    sparse = placeholder_of(tensor)
    return str(tensor.op.name) if sparse is None else sparse.name


def axes_by_placeholder(batch_axis: Mapping[Any, Any], graph: tf.Graph) -> Iterator[tuple[Any, Any]]:
    """Yields the keys of a script's `batch_axis`, with the placeholders that stand for sparse ones, and their axes.

    Args:
        batch_axis: by tensor, sparse tensor, or name.
        graph: the session's.

    Raises:
        CaptureError: a sparse placeholder is to be split along another axis than the first.
    """
    for key, axis in batch_axis.items():
        sparse = _made.get(graph, {}).get(key) if isinstance(key, str) else placeholder_of(key)
        if sparse is None:
            yield key, axis
            continue
        if axis not in (None, 0):
            raise CaptureError(
                f"batch_axis of the sparse placeholder {sparse.name} is {axis!r}. It is split along its first "
                "axis alone: transpose it, or set the axis to None if every replica is to get all of it."
            )
        yield from ((array, axis) for array in sparse.arrays)
