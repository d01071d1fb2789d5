"""Keras's progress bar without the time that a run takes to start."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import keras

from autodist.capture.keras_libraries import callbacks_of
from autodist.reading.batch_sharding import Given, WholeBatch

_PENDING = "_autodist_start_seconds"
"""What a model's first step took, until the bar of its epoch has been told."""


class TracedStep(Protocol):
    """A distributed step of one batch.

    Attributes:
        coming: numbers of examples of batches that are known to come; those that the step cannot take are refused with
            the first one.
        whole: the global batch of which the next call is given this worker's part; None: it is given the whole.
        reads_ahead: whether `on_each` may make one call of several.
    """

    coming: tuple[int, ...]
    whole: WholeBatch | None

    @property
    def reads_ahead(self) -> bool: ...

    @property
    def traces(self) -> int:
        """How many of its calls had to trace it so far; the first of them starts the run."""

    def __call__(self, data: Any) -> Any: ...

    def on_each(self, batches: Sequence[Given]) -> Any:
        """Makes a step on each of some batches; returns what the last does."""


def timing_the_start(step: TracedStep, model: keras.Model) -> Callable[[Any], Any]:
    """`step`, whose first call does not count in the time that Keras's progress bar shows for the epoch."""
    _watch_progress_bars(callbacks_of(model).ProgbarLogger)

    def call(data: Any) -> Any:
        if step.traces:
            return step(data)
        began = time.time()
        logs = step(data)
        vars(model)[_PENDING] = time.time() - began
        return logs

    return call


@functools.cache
def _watch_progress_bars(logger: Any) -> None:
    plain = logger.on_train_batch_end

    @functools.wraps(plain)
    def on_train_batch_end(self: Any, batch: int, logs: Any = None) -> None:
        seconds = vars(self.model).pop(_PENDING, None)
        if seconds is not None and self.progbar is not None:
            self.progbar._start += seconds
        plain(self, batch, logs)

    logger.on_train_batch_end = on_train_batch_end
