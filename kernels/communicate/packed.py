"""Packing of small tensors into one, since each tensor sent between workers costs a call of its own."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

MOST_BYTES = 256 << 10
"""Larger tensors are not packed, since packing copies them."""


def packed(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Packs tensors into one; returns them unchanged if they are large or cannot be packed."""
    if not is_packed(tensors):
        return list(tensors)
    return [tf.concat(list(map(_bytes_of if _is_mixed(tensors) else _flat, tensors)), 0)]


def unpacked(came: Sequence[tf.Tensor], like: Sequence[tf.Tensor | tf.TensorSpec]) -> list[tf.Tensor]:
    """Reverses `packed`; `like` has the dtypes and shapes of the tensors."""
    if not is_packed(like):
        return list(came)
    is_mixed = _is_mixed(like)
    pieces = tf.split(came[0], [_byte_size(t) if is_mixed else int(t.shape.num_elements()) for t in like])
    return [_from_bytes(p, t) if is_mixed else tf.reshape(p, t.shape) for p, t in zip(pieces, like, strict=True)]


def like_packed(like: Sequence[tf.Tensor | tf.TensorSpec]) -> list[tf.Tensor | tf.TensorSpec]:
    """Returns the specs of the tensors that `packed` returns."""
    if not is_packed(like):
        return list(like)
    dtype = tf.uint8 if _is_mixed(like) else like[0].dtype
    return [tf.TensorSpec([sum(map(_byte_size, like)) // dtype.size], dtype)]


def is_packed(like: Sequence[tf.Tensor | tf.TensorSpec]) -> bool:
    """Returns True if tensors of these specs are packed into one."""
    if len(like) < 2 or not all(t.shape.is_fully_defined() and _has_bytes(t.dtype) for t in like):
        return False
    return sum(map(_byte_size, like)) <= MOST_BYTES


def _is_mixed(like: Sequence[tf.Tensor | tf.TensorSpec]) -> bool:
    """Returns True if tensors have several dtypes, so that their bytes are packed."""
    return any(t.dtype != like[0].dtype for t in like)


def _flat(t: tf.Tensor) -> tf.Tensor:
    return tf.reshape(t, [int(t.shape.num_elements())])


def _has_bytes(dtype: tf.DType) -> bool:
    return bool(dtype.is_floating or dtype.is_integer)


def _byte_size(t: tf.Tensor | tf.TensorSpec) -> int:
    return int(t.shape.num_elements()) * t.dtype.size


def _bytes_of(t: tf.Tensor) -> tf.Tensor:
    return tf.reshape(tf.bitcast(t, tf.uint8), [_byte_size(t)])


def _from_bytes(piece: tf.Tensor, like: tf.Tensor | tf.TensorSpec) -> tf.Tensor:
    width = [like.dtype.size] if like.dtype.size > 1 else []
    return tf.bitcast(tf.reshape(piece, [*like.shape, *width]), like.dtype)
