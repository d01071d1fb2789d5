"""Arrays that `fit` is given: a worker slices Keras's batches of indices, and gathers the rows of its slice alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from keras import tree
from keras.src.trainers.data_adapters import array_slicing  # by which Keras makes rows of whatever it takes for arrays
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from tensorflow.python.util import nest  # tf.nest, with where each leaf stands

from autodist.batch.axis import keras_name
from autodist.reading.batch_sharding import Counted, OwnRows, ShardedBatches
from autodist.tf_compat.do_not_convert import ours


def own_arrays(adapter: Any, own_rows: OwnRows) -> ShardedBatches | None:
    """A worker's part of each batch that Keras would make of arrays, in Keras's order; None of what are no arrays.

    Args:
        adapter: Keras's, of what `fit` is given.
        own_rows: which rows of a batch the worker has to read.
    """
    if type(adapter) is not ArrayDataAdapter:
        return None
    numbers = np.arange(adapter._num_samples)  # which Keras's adapter shuffles and cuts as it would the arrays
    order = ArrayDataAdapter(numbers, batch_size=adapter._batch_size, shuffle=adapter._shuffle).get_tf_dataset()
    inputs = tree.lists_to_tuples(array_slicing.convert_to_sliceable(adapter._inputs, target_backend="tensorflow"))

    @ours
    def gather(batch: Any, arrays: Any) -> Counted:
        (indices,) = tf.nest.flatten(batch)
        examples = tf.size(indices, tf.int64)
        start, size = own_rows(examples)
        return Counted(examples, indices, _rows(arrays, indices[start : start + size]))

    # As Keras does: arrays come as elements, so that they are no constants of the function.
    paired = tf.data.Dataset.zip((order, tf.data.Dataset.from_tensors(inputs).repeat()))
    counted = paired.map(gather, num_parallel_calls=tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)
    return ShardedBatches(counted, _by_name(inputs))


def _rows(arrays: Any, indices: tf.Tensor) -> Any:
    def rows(one: Any) -> Any:
        if isinstance(one, array_slicing.TensorflowSparseWrapper):
            return array_slicing.slice_tensorflow_sparse_wrapper(one, indices)
        if isinstance(one, list | tuple | dict):
            return None  # what is in it is asked for
        return tf.gather(one, indices, axis=0) if tf.is_tensor(one) else one

    return tree.traverse(rows, arrays)


def _by_name(inputs: Any) -> list[tuple[str, Any]]:
    """The arrays that all workers have to have alike, as the script knows them."""
    found = nest.flatten_with_tuple_paths(inputs, expand_composites=True)
    return [(keras_name("data", path), array) for path, array in found if array is not None]
