"""Excludes the startup time of a run from Keras's progress bar."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import keras

from autodist.capture.keras.libraries import is_legacy
from autodist.reading.batch_sharding import GlobalBatch, ReadBatch
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
