"""Skips the batches of a `fit` on which an earlier run has already trained."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol

from keras.src.trainers.data_adapters.generator_data_adapter import GeneratorDataAdapter
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter
from keras.src.trainers.data_adapters.tf_dataset_adapter import TFDatasetAdapter
from keras.src.trainers.epoch_iterator import EpochIterator  # makes the batches of each epoch of `fit`

from autodist.reading.data_sets import begins_within
from autodist.tf_compat.patches import EPOCH_BATCHES, install


class SkipCallbacks(Protocol):
    """Callbacks for positions in the skipped data; each is called before the data's own code runs there."""

    def pass_epoch(self, epoch: int) -> None: ...

    def begin_epoch_again(self, batches: EpochIterator) -> None: ...

    def before_batches(self, batches: EpochIterator) -> None: ...

    def after_batches(self) -> None: ...


def skip_batches(epochs: int, batches: int, callbacks: SkipCallbacks) -> None:
    """Makes the next epoch of a `fit` start at the position of the earlier run.

    A data set that begins again in each epoch is started once for each completed epoch, so that its shuffles advance as
    before. A data set that continues over the epochs (`steps_per_epoch`) is read up to the position.

    Args:
        epochs: number of completed epochs.
        batches: number of batches of the next epoch that the earlier run has trained on.
        callbacks: called at positions of the skipped data.
    """

    def enumerate_rest(plain: Any, self: EpochIterator) -> Iterator[Any]:
        installed.remove()
        return _rest_of(self, epochs, batches, callbacks)

    installed = install(EPOCH_BATCHES, enumerate_rest)


def reads_on(batches_of: EpochIterator) -> bool:
    """Returns True if an epoch continues to read at the position where the one before ended."""
    return batches_of.steps_per_epoch is not None or isinstance(batches_of.data_adapter, GeneratorDataAdapter)


def _rest_of(batches_of: EpochIterator, epochs: int, batches: int, callbacks: SkipCallbacks) -> Iterator[Any]:
    for epoch in range(epochs):
        _pass_over(batches_of, epoch, callbacks)
    callbacks.begin_epoch_again(batches_of)
    is_there = batches == 0 and not reads_on(batches_of)
    # Each position is the first step of an execution, from Keras 3.11 on the last one, and the iterator.
    for number, position in enumerate(batches_of._enumerate_iterator()):
        if number == 0 and not is_there:
            callbacks.before_batches(batches_of)
        if position[0] >= batches:
            if not is_there:
                is_there = True
                callbacks.after_batches()
            yield position
            continue
        for _ in range(batches_of.steps_per_execution):
            with contextlib.suppress(StopIteration):  # the last ones of an epoch may be fewer
                next(position[-1])


def _pass_over(batches_of: EpochIterator, epoch: int, callbacks: SkipCallbacks) -> None:
    """Skips an epoch; only the first batch of most data sets is read."""
    adapter = batches_of.data_adapter
    if isinstance(adapter, PyDatasetAdapter) and not reads_on(batches_of):
        adapter.py_dataset.on_epoch_begin()  # no read: it would run ahead and draw random numbers
        callbacks.pass_epoch(epoch)
        adapter.py_dataset.on_epoch_end()
        return
    is_known = batches_of.num_batches is not None  # otherwise the epoch is read to its end, as in training
    begins_anew = isinstance(adapter, TFDatasetAdapter) and begins_within(adapter.get_tf_dataset())
    is_read = batches_of.steps_per_epoch is not None or not is_known or begins_anew
    with batches_of.catch_stop_iteration():
        for number, (*_, iterator) in enumerate(batches_of._enumerate_iterator()):
            if number == 0 or is_read:
                with contextlib.suppress(*([StopIteration] if is_known else [])):
                    for _ in range(batches_of.steps_per_execution):
                        next(iterator)
