"""Distributed steps in Keras's loops: their batches, and the startup time that the progress bar excludes."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import keras
import tensorflow as tf
from keras import tree

from autodist.capture.keras.libraries import is_legacy
from autodist.reading.batch_sharding import GlobalBatch, ReadBatch, global_batch_of
from autodist.reading.data_sets import Read, quick_read
from autodist.tf_compat.do_not_convert import ours
from autodist.tf_compat.patches import LEGACY_PROGRESS, PROGRESS, Patch, install

_PENDING = "_autodist_start_seconds"
"""Duration of a model's first step, until the progress bar of its epoch has excluded it."""


class TracedStep(Protocol):
    """A distributed step of one batch.

    Attributes:
        coming: numbers of examples of later batches that are known already; those that the step cannot accept are
            rejected with the first batch.
        global_batch: the global batch, if the next call's argument is this worker's part of it; None if the argument is
            the global batch.
        reads_ahead: True if `on_each` may run several steps in one call.
    """

    coming: tuple[int, ...]
    global_batch: GlobalBatch | None

    @property
    def reads_ahead(self) -> bool: ...

    @property
    def traces(self) -> int:
        """Number of calls that traced the step so far; the first one starts the run."""

    def __call__(self, data: Any) -> Any: ...

    def on_each(self, batches: Sequence[ReadBatch]) -> Any:
        """Runs a step on each batch and returns the result of the last."""


def timing_the_start(step: TracedStep, model: keras.Model) -> Callable[[Any], Any]:
    """Wraps `step` so that its first call does not count in the epoch time of Keras's progress bar."""
    _watch_progress_bars(LEGACY_PROGRESS if is_legacy(model) else PROGRESS)

    def call(data: Any) -> Any:
        if step.traces:
            return step(data)
        began = time.time()
        logs = step(data)
        vars(model)[_PENDING] = time.time() - began
        return logs

    return call


@functools.cache
def _watch_progress_bars(row: Patch) -> None:
    def on_train_batch_end(plain: Any, self: Any, batch: int, logs: Any = None) -> None:
        seconds = vars(self.model).pop(_PENDING, None)
        if seconds is not None and self.progbar is not None:
            self.progbar._start += seconds
        plain(self, batch, logs)

    install(row, on_train_batch_end)


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
