"""Gives weights of sparse lookups, and masks of sparse entries, the static length of the entries.

Entry k of the weights belongs to entry k of the ids. A replica with as many weights as ids in its part of the batch
pairs them as one device does. A reshape fails if the numbers differ; TensorFlow's arithmetic may broadcast instead.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from autodist.capture.patches import SPARSE_LOOKUPS, SPARSE_RETAINS, patched


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
