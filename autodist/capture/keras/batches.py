"""Batches as Keras passes them to steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import tensorflow as tf
from keras import tree

from autodist.capture.keras.progress import TracedStep
from autodist.reading.batch_sharding import ReadBatch, global_batch_of
from autodist.reading.quick_reads import Read, quick_read
from autodist.tf_compat.do_not_convert import ours

_reads: WeakKeyDictionary[tf.data.Iterator, Read | None] = WeakKeyDictionary()


def next_batch(iterator: Iterator[Any]) -> Any:
    """Returns the next batch as Keras passes it to a step: components that a generator omits are None."""
    if isinstance(iterator, tf.data.Iterator):
        if iterator not in _reads:
            _reads[iterator] = quick_read(iterator)
        read = _reads[iterator]
        if read is not None:
            return read()
    return without_optionals(next(iterator))


def without_optionals(data: Any) -> Any:
    """Returns a batch as Keras passes it to a step: components that a generator omits are None."""
    return tree.map_structure(lambda x: None if isinstance(x, tf.experimental.Optional) else x, data)


def next_with_global_batch(iterator: Iterator[Any]) -> ReadBatch:
    """Returns the next batch, as `next_batch`, and the global batch that it is this worker's part of."""
    return next_batch(iterator), global_batch_of(iterator)


def on_several(step: TracedStep, first: ReadBatch, others: Iterator[Any], most: int) -> Any:
    """Runs a step on each of up to `most` batches, fewer if the data end, and returns the result of the last.

    Args:
        step: a step of one batch.
        first: the first batch.
        others: iterator over the other batches; its error is raised after the steps on the batches before.
        most: largest number of steps.
    """
    batches, fault = [first], None
    try:
        while len(batches) < most:
            batches.append(next_with_global_batch(others))
    except StopIteration:
        pass
    except Exception as error:  # noqa: BLE001 - the script's own error
        fault = error
    logs = step.on_each(batches)
    if fault is not None:
        raise fault
    return logs


def until_end(iterator: Iterator[Any]) -> Iterable[Any]:
    """Yields the remaining elements of an iterator."""
    while True:
        try:
            yield next(iterator)
        except (StopIteration, tf.errors.OutOfRangeError):
            return


def iterator_of(data: Any, spec: Any) -> Iterator[Any]:
    """Returns an iterator of one batch with the element spec of the batch's iterator, to avoid another trace."""

    @ours
    def as_open(*leaves: Any) -> Any:
        return tf.nest.pack_sequence_as(spec, [_as_open(*pair) for pair in zip(leaves, specs, strict=True)])

    specs = tf.nest.flatten(spec)
    return iter(tf.data.Dataset.from_tensors(tuple(tf.nest.flatten(data))).map(as_open))


def _as_open(leaf: Any, spec: Any) -> Any:
    if not isinstance(spec, tf.TensorSpec) or spec.shape.rank is None:
        return leaf
    return tf.raw_ops.PlaceholderWithDefault(input=leaf, shape=spec.shape)
