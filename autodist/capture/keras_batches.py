"""Batches as Keras hands them to steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import tensorflow as tf
from keras import tree

from autodist.capture.keras_progress import TracedStep
from autodist.reading.batch_sharding import Given, whole_of
from autodist.reading.quick_reads import Read, quick_read

_reads: WeakKeyDictionary[tf.data.Iterator, Read | None] = WeakKeyDictionary()


def next_batch(iterator: Iterator[Any]) -> Any:
    """The next batch as Keras's own functions hand it to a step: what a generator leaves out is None."""
    if isinstance(iterator, tf.data.Iterator):
        if iterator not in _reads:
            _reads[iterator] = quick_read(iterator)
        read = _reads[iterator]
        if read is not None:
            return read()
    return without_optionals(next(iterator))


def without_optionals(data: Any) -> Any:
    """A batch as Keras's own functions hand it to a step: what a generator leaves out is None."""
    return tree.map_structure(lambda x: None if isinstance(x, tf.experimental.Optional) else x, data)


def next_given(iterator: Iterator[Any]) -> Given:
    """The next batch, as `next_batch`, and the global one of which it is this worker's part."""
    return next_batch(iterator), whole_of(iterator)


def on_several(step: TracedStep, first: Given, others: Iterator[Any], most: int) -> Any:
    """Makes a step on each of up to so many batches, fewer where the data end; returns what the last does.

    Args:
        step: of one batch.
        first: of the batches.
        others: gives those after it; what it raises comes once the steps before were made.
        most: how many steps are made at most.
    """
    batches, fault = [first], None
    try:
        while len(batches) < most:
            batches.append(next_given(others))
    except StopIteration:
        pass
    except Exception as error:  # noqa: BLE001 - it is the script's
        fault = error
    logs = step.on_each(batches)
    if fault is not None:
        raise fault
    return logs
