"""Front ends for Keras 3 and tf_keras: models in a scope train and evaluate through AutoDist."""

from __future__ import annotations

import functools
import inspect
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import keras
import tensorflow as tf

from autodist.capture.keras.call_arguments import lengths_to_come, recording_lengths, replacing_data
from autodist.capture.keras.distribution.checks import check_model
from autodist.capture.keras.errors import explaining_graphs, hiding_own_frames
from autodist.capture.keras.evaluations import Evaluations
from autodist.capture.keras.fits import SHOW_PROGRESS, Fits
from autodist.capture.keras.libraries import steps_per_execution
from autodist.capture.keras.model_state import is_about_to_step, make_state
from autodist.capture.keras.own_batches import reading_own_batches, takes_parts
from autodist.capture.keras.steps import TracedStep, next_with_global_batch, on_several, timing_the_start
from autodist.capture.keras.train_functions import is_making, makes_its_own, one_batch_step, own_maker, set_maker
from autodist.capture.other_strategies import require_no_strategy
from autodist.logs.terminal import ALIKE_EVERYWHERE
from autodist.reading.batch_sharding import PartsIterator, Reading
from autodist.tf_compat.do_not_convert import converting, ours
from autodist.tf_compat.patches import LEGACY_MODELS, MODELS, Patch, patched

log = logging.getLogger("autodist")

BatchAxis = Mapping[str, int | None]
"""By the name of an input of `fit`, the axis along which it is split, or None."""
StepMaker = Callable[..., TracedStep]
"""Makes a distributed step from a `train_step`, a function of one batch.

Its other arguments are `jit_compile`, the batch axes of the inputs, and `is_own` if batches are this worker's parts.
"""


class AdoptedModels(ABC):
    """Lets models train through distributed steps.

    Args:
        distribute: makes a distributed step from a model's `train_step`.
        fits: fits models on several workers; None on one.
        evaluations: evaluates models on several replicas; None if each worker evaluates alone.
        around_fit: wraps the `fit` of a model.
        reading: the rule by which this worker reads its part of the batches of `fit`; None if it reads all of each.
        whole_data: returns the data that Keras reads in place of those that are passed to `fit`, `evaluate`, `predict`;
            its second argument is True if the model trains on them.
    """

    patches: Mapping[str, Patch]
    """The rows of the methods that are wrapped in the classes of models, by the names of the methods."""

    def __init__(
        self,
        distribute: StepMaker,
        fits: Fits | None = None,
        evaluations: Evaluations | None = None,
        around_fit: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda fit: fit,
        reading: Reading | None = None,
        whole_data: Callable[[Any, bool], Any] = lambda data, trains: data,
    ) -> None:
        self._distribute, self._fits, self._evaluations = distribute, fits, evaluations
        self._around_fit, self._reading, self._whole_data = around_fit, reading, whole_data
        self._batch_axis: BatchAxis = {}

    @abstractmethod
    def train_step(self, model: Any) -> Callable[[Any], Any]:
        """Returns the training step of a model, a function of one batch."""

    @abstractmethod
    def before_step(self, model: Any, data: Any, is_first: bool) -> None:
        """Called before each training step, or before several in one call, with the first batch."""

    @contextmanager
    def adopting(self, batch_axis: BatchAxis | None = None) -> Iterator[None]:
        """Adopts every model that is built, compiled or fitted while the context is open.

        Args:
            batch_axis: the axes along which the inputs of `fit` are split, as for `AutoDist.scope`.
        """
        self._batch_axis = {} if batch_axis is None else batch_axis
        with patched(self._wrappers()):
            yield

    def _wrappers(self) -> dict[Patch, Callable[..., Any]]:
        wrappers = {
            "compile": self._call_and_adopt,
            "make_train_function": self._adopt_and_make,
            "__init__": self._call_and_adopt,  # a model that is built in the scope may be compiled after it
            **dict.fromkeys(SHOW_PROGRESS, hiding_own_frames(self._fit)),
        }
        return {self.patches[name]: wrapper for name, wrapper in wrappers.items()}

    def _call_and_adopt(self, method: Callable[..., Any], model: Any, /, *args: Any, **kwargs: Any) -> None:
        method(model, *args, **kwargs)
        self.adopt(model)

    def _adopt_and_make(self, make: Callable[..., Any], model: Any, force: bool = False) -> Any:
        """Wraps a class's `make_train_function`: adopts the model and returns its distributed train function."""
        if is_making(model):
            return make(model, force)
        self.adopt(model)
        return vars(model).get("make_train_function", functools.partial(make, model))(force)

    def _fit(self, method: Any, model: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Wraps `fit`, `evaluate` or `predict` of a class, for models that were compiled before the scope."""
        if method.__name__ == "fit" and own_maker(model, "train") is not None:
            self.adopt(model)  # Keras would call the model's own function instead of the class's, which adopts models
        call = method.__get__(model)
        if self._fits is not None:
            call = self._fits.wrapped(call)
        if method.__name__ == "fit":
            call = self._around_fit(call)
        return replacing_data(call, self._whole_data)(*args, **kwargs)

    def adopt(self, model: Any) -> None:
        """Sets a distributed train function on one model, which keeps it after the scope."""
        batch_axis = self._batch_axis
        reading = self._reading_along(batch_axis)

        def make_train_function(force: bool = False) -> Any:
            if is_making(model):  # the script's own function calls the one that it found on the model
                return type(model).make_train_function(model, force)
            if model.train_function is None or force:
                _check(model)
                model.train_function = self._train_function(model, batch_axis)
            return model.train_function

        set_maker(model, "train", make_train_function)
        model.train_function = None
        evaluations = None if batch_axis else self._evaluations  # with axes, each worker evaluates all of each batch
        if evaluations is not None:
            evaluations.adopt(model)
        for name in SHOW_PROGRESS:
            method = self._method(model, name, reading, evaluations)
            vars(model)[name] = hiding_own_frames(replacing_data(method, self._whole_data))

    def _reading_along(self, batch_axis: BatchAxis) -> Reading | None:
        """Returns the rule by which this worker reads its part of batches that are split along these axes."""
        reading = self._reading
        if reading is None or not batch_axis:
            return reading
        if reading.files is not None:
            raise reading.files.refused(
                "batch_axis sets other axes of the examples than the first, along which data sets make "
                "batches of them; allowed: no batch_axis, or no `shard`."
            )
        return replace(reading, rows=None)  # not only rows are split

    def _method(self, model: Any, name: str, reading: Reading | None, evaluations: Evaluations | None) -> Any:
        """Returns the wrapped `fit`, `evaluate` or `predict` of a model."""
        method = _looked_up(model, name)
        if name != "fit" and self._fits is None and reading is None:
            return method
        if self._fits is not None:
            method = self._fits.wrapped(method)
        if reading is not None:
            method = reading_own_batches(method, model, reading)
        if name != "fit":
            return method if evaluations is None else evaluations.noting_interrupts(method, model)
        has_any_length = reading is not None and reading.files is not None  # as the parts of sharded files have
        return self._around_fit(method if has_any_length else recording_lengths(method, model))

    def _train_function(self, model: Any, batch_axis: BatchAxis) -> Callable[[Iterator[Any]], Any]:
        """Returns a function that trains a model on an iterator's next batches and returns the logs of the last one."""
        train_step = self.train_step(model)

        @functools.cache
        def steps_of(**options: bool) -> tuple[Callable[[Any], Any], TracedStep]:
            distributed = self._distribute(train_step, bool(model.jit_compile), batch_axis, **options)
            return timing_the_start(distributed, model), distributed

        of_batches = steps_of()

        def train(iterator: Iterator[Any]) -> Any:
            step, distributed = steps_of(is_own=True) if isinstance(iterator, PartsIterator) else of_batches
            distributed.coming = lengths_to_come(model)
            steps = steps_per_execution(model)
            with explaining_graphs(model):
                batch = next_with_global_batch(iterator)
                self.before_step(model, batch[0], is_first=not distributed.traces)
                if steps > 1 and distributed.traces and distributed.reads_ahead:
                    return on_several(distributed, batch, iterator, steps)
                data, distributed.global_batch = batch
                logs = step(data)
                for _ in range(steps - 1):
                    try:
                        data, distributed.global_batch = next_with_global_batch(iterator)
                    except StopIteration:
                        break
                    logs = step(data)
            return logs

        takes_parts(train)
        return train


class KerasModels(AdoptedModels):
    """Lets models of Keras 3 train through distributed steps."""

    patches = MODELS

    def train_step(self, model: keras.Model) -> Callable[[Any], Any]:
        """Returns the model's `train_step`, or the step of the script's own `make_train_function`."""
        if makes_its_own(model, "train"):
            return one_batch_step(model, "train")

        @ours
        def train_step(data: Any) -> Any:
            return converting(model.train_step)(data)

        return train_step

    def before_step(self, model: keras.Model, data: Any, is_first: bool) -> None:
        """Creates the model's state before the first step, and calls the callback that waits for a step."""
        if is_first:
            make_state(model, data)
        is_about_to_step(model)


class LegacyModels(AdoptedModels):
    """Lets models of tf_keras train through distributed steps.

    The step is the function that the model's class makes by `make_train_function`, traced with an iterator of one
    batch: tf_keras's function, which calls `train_step`, or one of the script.
    """

    patches = LEGACY_MODELS

    def adopt(self, model: Any) -> None:
        """Sets a distributed train function on one model, unless it was built for a session."""
        if tf.executing_eagerly():
            super().adopt(model)

    def train_step(self, model: Any) -> Callable[[Any], Any]:
        """Returns the step that the model's class makes."""
        return one_batch_step(model, "train")

    def before_step(self, model: Any, data: Any, is_first: bool) -> None:
        """Does nothing: tf_keras creates the model's state in its own function."""


def _looked_up(model: Any, name: str) -> Callable[..., Any]:
    """Returns a method of a model's class that is looked up at each call: mlflow's autologging may replace it later."""
    method = getattr(type(model), name).__get__(model)

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(type(model), name).__get__(model)(*args, **kwargs)

    vars(call)["__self__"] = model
    vars(call)["__signature__"] = inspect.signature(method)  # the bound method's, which its own wrappers hide
    return call


def _check(model: Any) -> None:
    require_no_strategy(model.distribute_strategy, model.name)
    check_model(model)
    if model.run_eagerly:
        log.warning(
            "%s is compiled with run_eagerly=True; AutoDist compiles its steps all the same, since it distributes "
            "their graph.", model.name, extra=ALIKE_EVERYWHERE,
        )  # fmt: skip
