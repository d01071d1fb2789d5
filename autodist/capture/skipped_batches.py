"""Batches of a `fit` that an earlier run has trained on: read, and passed over."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from keras.src.trainers.epoch_iterator import EpochIterator  # which makes the batches of each epoch of `fit`


def skip_batches(epochs: int, batches: int) -> None:
    """What the next epoch of a `fit` gives begins where the earlier run was.

    A data set that is made anew for each epoch is begun as often as it was, so that what shuffles it has drawn as many
    orders; one that goes on over the epochs (`steps_per_epoch`) is read that far.

    Args:
        epochs: that were over.
        batches: of the next one that were trained on.
    """
    plain = EpochIterator._enumerate_iterator

    def enumerate_rest(self: EpochIterator) -> Iterator[Any]:
        EpochIterator._enumerate_iterator = plain
        return _rest_of(self, epochs, batches)

    EpochIterator._enumerate_iterator = enumerate_rest


def _rest_of(batches_of: EpochIterator, epochs: int, batches: int) -> Iterator[Any]:
    for _ in range(epochs):
        _pass_over(batches_of)
    for begin, end, iterator in batches_of._enumerate_iterator():
        if begin >= batches:
            yield begin, end, iterator
            continue
        for _ in range(batches_of.steps_per_execution):
            with contextlib.suppress(StopIteration):  # the last ones of an epoch may be fewer
                next(iterator)


def _pass_over(batches_of: EpochIterator) -> None:
    """An epoch, of which no batch is used, and of most data sets only the first one read."""
    is_known = batches_of.num_batches is not None  # else reading it whole tells, as it did when it was trained on
    is_read = batches_of.steps_per_epoch is not None or not is_known
    with batches_of.catch_stop_iteration():
        for number, (_, _, iterator) in enumerate(batches_of._enumerate_iterator()):
            if number == 0 or is_read:
                with contextlib.suppress(*([StopIteration] if is_known else [])):
                    for _ in range(batches_of.steps_per_execution):
                        next(iterator)
