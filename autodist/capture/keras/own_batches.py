"""Makes each worker read its own part of the batches of `fit`."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import tree
from keras.src.backend.tensorflow import trainer
from keras.src.trainers.data_adapters import array_slicing  # Keras's conversion of array-likes to rows
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter
from keras.src.trainers.data_adapters.tf_dataset_adapter import TFDatasetAdapter
from tensorflow.python.util import nest  # tf.nest, with the path of each leaf

from autodist.batch.axis import keras_name
from autodist.errors import CaptureError
from autodist.logs.terminal import ALIKE_EVERYWHERE
from autodist.reading.batch_sharding import OwnRows, PartOfBatch, Reading, ShardedBatches, WorkerParts
from autodist.reading.data_sets import in_one_order, kind_of
from autodist.reading.element_sharding import reading_own
from autodist.reading.file_sharding import ShardedFiles
from autodist.tf_compat.do_not_convert import ours
from autodist.tf_compat.patches import EPOCH_ITERATOR, patched

log = logging.getLogger("autodist")

_TAKES_PARTS = "_autodist_takes_parts"


def takes_parts(train: Callable[..., Any]) -> None:
    """Marks a train function of Keras as one that accepts an iterator over parts of batches."""
    setattr(train, _TAKES_PARTS, True)


def reading_own_batches(method: Callable[..., Any], model: keras.Model, reading: Reading) -> Callable[..., Any]:
    """Wraps a model's `fit`, `evaluate` or `predict`: `fit` trains on parts of batches if these can be read apart."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not getattr(model.train_function, _TAKES_PARTS, model.train_function is None):
            if reading.files is not None:
                raise reading.files.refused(
                    f"{model.name} trains by the script's own train function, which would take parts for whole "
                    "batches; allowed: Keras's own, or a loop over ad.distribute_dataset."
                )
            return method(*args, **kwargs)  # the script's own train function
        with _reading_own(model, reading):
            return method(*args, **kwargs)

    return call


@contextmanager
def _reading_own(model: keras.Model, reading: Reading) -> Iterator[None]:
    """Makes a model read only its part of the batches that it trains on while the context is open."""

    def make(plain: Any, *args: Any, **kwargs: Any) -> trainer.TFEpochIterator:
        # The elements of a PyDataset are examined here, on the script's own thread.
        made, asks = reading.slices.are_used_by(lambda: plain(*args, **kwargs))
        is_of_model = sys._getframe(2).f_locals.get("self") is model
        if not is_of_model:
            return made
        is_cut = asks and isinstance(made.data_adapter, PyDatasetAdapter)
        if "class_weight" in kwargs:  # which Keras passes for training data only
            made._distributed_dataset = _own_batches(made, reading, is_cut)
        elif is_cut:
            data = type(made.data_adapter.py_dataset).__name__
            raise CaptureError(
                f"{data} uses ad.batch_slice, and {model.name} is evaluated on it: there each worker would see its "
                "own part alone. Evaluate on a PyDataset that returns whole batches."
            )
        else:
            made._distributed_dataset = in_one_order(made._distributed_dataset)
        return made

    with patched({EPOCH_ITERATOR: make}):
        yield


def _own_batches(batches: trainer.TFEpochIterator, reading: Reading, is_cut: bool) -> Any:
    """Returns the batches that `fit` iterates over: the parts, or whole batches if these cannot be read apart."""
    whole = batches._distributed_dataset
    if _changes_within_iteration(batches):
        whole = _without_read_ahead(whole, batches.data_adapter)
    if reading.files is not None:
        is_data_set = isinstance(batches.data_adapter, TFDatasetAdapter)
        return ShardedFiles(whole if is_data_set else batches.data_adapter, reading.files)
    if is_cut:
        return WorkerParts(whole)
    if reading.rows is None:
        return in_one_order(whole)
    return own_arrays(batches.data_adapter, reading.rows) or reading_own(whole, reading) or in_one_order(whole)


def _changes_within_iteration(batches: trainer.TFEpochIterator) -> bool:
    """Returns True if a PyDataset acts on the ends of epochs, and epochs end in the middle of an iteration over it.

    Batches that are read ahead come before such a change on one worker, and after it on another one.
    """
    adapter, steps = batches.data_adapter, batches.steps_per_epoch
    if not isinstance(adapter, PyDatasetAdapter) or steps is None or steps == adapter.py_dataset.num_batches:
        return False
    plain, kind = keras.utils.PyDataset, type(adapter.py_dataset)
    return kind.on_epoch_end is not plain.on_epoch_end or kind.on_epoch_begin is not plain.on_epoch_begin


def _without_read_ahead(data: tf.data.Dataset, adapter: PyDatasetAdapter) -> tf.data.Dataset:
    """Returns the data that Keras made of a PyDataset, read batch by batch, as with `workers=1`."""
    if adapter.enqueuer is not None:
        adapter.enqueuer = None  # Keras asks for it at the start of each iteration and epoch
        name = type(adapter.py_dataset).__name__
        log.warning(
            "%s acts on the ends of epochs, and steps_per_epoch differs from its length: its batches are read one by "
            "one, and not ahead by its workers=%d, since some would come from before a change and some from after it. "
            "To let them read ahead, leave out steps_per_epoch, or make it equal to the length.",
            name, adapter.py_dataset.workers, extra=ALIKE_EVERYWHERE,
        )  # fmt: skip
    options = tf.data.Options()
    options.autotune.enabled = False  # which would insert another read-ahead
    return (data._input_dataset if kind_of(data) == "Prefetch" else data).with_options(options)


def own_arrays(adapter: Any, own_rows: OwnRows) -> ShardedBatches | None:
    """Returns a worker's part of each batch that Keras makes of arrays, in Keras's order; None for other data.

    Args:
        adapter: Keras's adapter for the data of `fit`.
        own_rows: returns the rows of a batch that the worker reads.
    """
    if type(adapter) is not ArrayDataAdapter:
        return None
    numbers = np.arange(adapter._num_samples)  # Keras's adapter shuffles and batches them as it would the arrays
    order = ArrayDataAdapter(numbers, batch_size=adapter._batch_size, shuffle=adapter._shuffle).get_tf_dataset()
    inputs = tree.lists_to_tuples(array_slicing.convert_to_sliceable(adapter._inputs, target_backend="tensorflow"))

    @ours
    def gather(batch: Any, arrays: Any) -> PartOfBatch:
        (indices,) = tf.nest.flatten(batch)
        examples = tf.size(indices, tf.int64)
        start, size = own_rows(examples)
        return PartOfBatch(examples, indices, _rows(arrays, indices[start : start + size]))

    # As in Keras, arrays are elements and not constants of the function.
    paired = tf.data.Dataset.zip((order, tf.data.Dataset.from_tensors(inputs).repeat()))
    counted = paired.map(gather, num_parallel_calls=tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)
    return ShardedBatches(counted, _by_name(inputs))


def _rows(arrays: Any, indices: tf.Tensor) -> Any:
    def rows(one: Any) -> Any:
        if isinstance(one, array_slicing.TensorflowSparseWrapper):
            return array_slicing.slice_tensorflow_sparse_wrapper(one, indices)
        if isinstance(one, list | tuple | dict):
            return None  # descends into it
        return tf.gather(one, indices, axis=0) if tf.is_tensor(one) else one

    return tree.traverse(rows, arrays)


def _by_name(inputs: Any) -> list[tuple[str, Any]]:
    """Returns the arrays that have to be equal on all workers, with the names that the script uses."""
    found = nest.flatten_with_tuple_paths(inputs, expand_composites=True)
    return [(keras_name("data", path), array) for path, array in found if array is not None]
