"""Front end for Keras 3: models compiled in a scope train through AutoDist, with `fit` and its features unchanged."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import keras

from autodist.capture.adopted_models import AdoptedModels, BatchAxis, StepMaker, explaining_graphs
from autodist.capture.fit_arguments import lengths_to_come
from autodist.capture.fit_batches import reading_own_batches, takes_parts
from autodist.capture.keras_batches import next_with_global_batch, on_several
from autodist.capture.keras_evaluations import Evaluations
from autodist.capture.keras_fits import SHOW_PROGRESS, Fits
from autodist.capture.keras_progress import TracedStep, timing_the_start
from autodist.capture.keras_state import is_about_to_step, make_state
from autodist.capture.patches import MODELS
from autodist.capture.train_functions import makes_its_own, one_batch_step
from autodist.reading.batch_sharding import PartsIterator, Reading
from autodist.tf_compat.do_not_convert import converting, ours


class KerasModels(AdoptedModels):
    """Lets models of Keras 3 train through distributed steps.

    Args:
        distribute: makes a distributed step from a model's `train_step`.
        fits: fits models on several workers; None on one.
        evaluations: evaluates models on several replicas; None if each worker evaluates alone.
        around_fit: wraps the `fit` of a model.
        reading: how this worker reads its part of the batches of `fit`; None if it reads all of each.
    """

    patches = MODELS

    def __init__(
        self,
        distribute: StepMaker,
        fits: Fits | None = None,
        evaluations: Evaluations | None = None,
        around_fit: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda fit: fit,
        reading: Reading | None = None,
    ) -> None:
        super().__init__(distribute, fits, evaluations, around_fit)
        self._reading = reading

    def _reading_along(self, batch_axis: BatchAxis) -> Reading | None:
        """Returns how this worker reads its part of batches split along these axes."""
        reading = self._reading
        if reading is None or not batch_axis:
            return reading
        if reading.files is not None:
            raise reading.files.refused(
                "batch_axis sets other axes of the examples than the first, along which data sets make "
                "batches of them; allowed: no batch_axis, or no `shard`."
            )
        return replace(reading, rows=None)  # not only rows are split

    def called(self, batch_axis: BatchAxis) -> tuple[str, ...]:
        """Returns the names of the methods that are wrapped on a model."""
        return super().called(batch_axis) if self._reading_along(batch_axis) is None else SHOW_PROGRESS

    def reads(self, model: keras.Model, method: Callable[..., Any], batch_axis: BatchAxis) -> Callable[..., Any]:
        """Returns a model's `fit`, `evaluate` or `predict`, which reads this worker's part of batches if it can."""
        reading = self._reading_along(batch_axis)
        return method if reading is None else reading_own_batches(method, model, reading)

    def knows_lengths(self, batch_axis: BatchAxis) -> bool:
        """Returns False if files are sharded among workers, since a part may then have any length."""
        reading = self._reading_along(batch_axis)
        return reading is None or reading.files is None

    def train_function(self, model: keras.Model, batch_axis: BatchAxis) -> Callable[[Iterator[Any]], Any]:
        """Returns a function that trains a model on an iterator's next batches and returns the logs of the last one."""

        train_step = _step_of(model)
        of_batches = self._distribute(train_step, model.jit_compile, batch_axis)
        batches = timing_the_start(of_batches, model), of_batches

        @functools.cache
        def parts() -> tuple[Callable[[Any], Any], TracedStep]:
            of_parts = self._distribute(train_step, model.jit_compile, batch_axis, is_own=True)
            return timing_the_start(of_parts, model), of_parts

        def train(iterator: Iterator[Any]) -> Any:
            step, distributed = parts() if isinstance(iterator, PartsIterator) else batches
            distributed.coming = lengths_to_come(model)
            with explaining_graphs(model):
                first = next_with_global_batch(iterator)
                data, distributed.whole = first
                if not distributed.traces:
                    make_state(model, data)
                is_about_to_step(model)
                if model.steps_per_execution > 1 and distributed.traces and distributed.reads_ahead:
                    return on_several(distributed, first, iterator, model.steps_per_execution)
                logs = step(data)
                for _ in range(model.steps_per_execution - 1):
                    try:
                        data, distributed.whole = next_with_global_batch(iterator)
                    except StopIteration:
                        break
                    logs = step(data)
            return logs

        takes_parts(train)
        return train


def _step_of(model: keras.Model) -> Callable[[Any], Any]:
    """Returns the step of one batch: the model's `train_step`, or that of the script's own `make_train_function`."""
    if makes_its_own(model, "train"):
        return one_batch_step(model, "train")

    @ours
    def train_step(data: Any) -> Any:
        return converting(model.train_step)(data)

    return train_step
