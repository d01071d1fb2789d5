"""Front end of Keras 3: models compiled in a scope train through AutoDist, `fit` and all that stands around it kept."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import keras

from autodist.capture.fit_batches import reading_own_batches, takes_parts
from autodist.capture.fit_lengths import lengths_to_come, noting_lengths
from autodist.capture.keras_batches import next_given, on_several
from autodist.capture.keras_evaluations import Evaluations
from autodist.capture.keras_fits import SHOW_PROGRESS, Fits
from autodist.capture.keras_progress import TracedStep, timing_the_start
from autodist.capture.keras_state import is_about_to_step, make_state
from autodist.capture.other_strategies import require_no_strategy
from autodist.capture.own_frames import hiding_own_frames
from autodist.capture.replaced import all_replaced, definer_of
from autodist.converting import converting, ours
from autodist.reading.own_batches import PartsIterator, Reading
from autodist.terminal_log import ALIKE_EVERYWHERE

log = logging.getLogger("autodist")

BatchAxis = Mapping[str, int | None]
"""By the name of an input of `fit`, the axis along which it is split, or None."""

StepMaker = Callable[..., TracedStep]
"""Makes of a Keras `train_step`, a function of one batch, one that trains on all replicas; further, it is told whether
XLA compiles it, the axes of inputs and, where a worker is given its own part of batches, that it is."""


class KerasModels:
    """Lets models train through steps that `distribute` makes.

    Args:
        distribute: makes a distributed step of a model's `train_step`.
        fits: how this worker is to fit models where it is one of several.
        evaluations: how models are to be evaluated where several replicas share that.
        around_fit: makes of a model's `fit` what the script calls.
        reading: how this worker reads its part of the batches of `fit`; None: it reads all of each.
    """

    def __init__(
        self,
        distribute: StepMaker,
        fits: Fits | None = None,
        evaluations: Evaluations | None = None,
        around_fit: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda fit: fit,
        reading: Reading | None = None,
    ) -> None:
        self._distribute, self._fits, self._evaluations = distribute, fits, evaluations
        self._around_fit, self._reading = around_fit, reading
        self._batch_axis: BatchAxis = {}

    @contextmanager
    def adopting(self, batch_axis: BatchAxis | None = None) -> Iterator[None]:
        """Adopts every model that is built, compiled or fitted while the context is open.

        Args:
            batch_axis: along which the inputs of their `fit` are split; as `AutoDist.scope` takes it.
        """
        self._batch_axis = {} if batch_axis is None else batch_axis
        # Where Keras defines them: a model counts as one with a `compile` of its own, which loading a file leaves
        # uncompiled, if `keras.Model.compile` is not the function that stands there.
        compiles, trains = definer_of(keras.Model, "compile"), definer_of(keras.Model, "make_train_function")
        compile_model, make_train, build = compiles.compile, trains.make_train_function, trains.__init__
        adopt = self.adopt

        @functools.wraps(build)
        def build_and_adopt(model: keras.Model) -> None:
            build(model)
            adopt(model)  # it remembers where it was built: what is compiled after the scope is distributed, too

        @functools.wraps(compile_model)
        def compile_and_adopt(model: keras.Model, *args: Any, **kwargs: Any) -> None:
            compile_model(model, *args, **kwargs)
            adopt(model)

        @functools.wraps(make_train)
        def adopt_and_make(model: keras.Model, force: bool = False) -> Any:
            adopt(model)
            return model.make_train_function(force)

        adopting = [
            (compiles, "compile", compile_and_adopt),
            (trains, "make_train_function", adopt_and_make),
            (trains, "__init__", build_and_adopt),
        ]
        with all_replaced(adopting), self._fitting():
            yield

    @contextmanager
    def _fitting(self) -> Iterator[None]:
        """While it is open, models that were built and compiled before are fitted as adopted ones are."""
        fits, trains = self._fits, definer_of(keras.Model, "make_train_function")
        plain = {name: vars(trains)[name] for name in (SHOW_PROGRESS if fits is not None else ("fit",))}

        def fitting(method: Any) -> Any:
            @functools.wraps(method)
            def call(model: keras.Model, *args: Any, **kwargs: Any) -> Any:
                bound = method.__get__(model)
                ours = fits.wrapped(bound) if fits is not None else bound
                return (self._around_fit(ours) if method.__name__ == "fit" else ours)(*args, **kwargs)

            return call

        with all_replaced((trains, name, hiding_own_frames(fitting(method))) for name, method in plain.items()):
            yield

    def adopt(self, model: keras.Model) -> None:
        """Gives one model a train function of ours; it keeps it after the scope."""
        batch_axis = self._batch_axis

        def make_train_function(force: bool = False) -> Any:
            if model.train_function is None or force:
                _check(model)
                model.train_function = self._train_function(model, batch_axis)
            return model.train_function

        vars(model)["make_train_function"] = make_train_function
        model.train_function = None
        evaluations = None if batch_axis else self._evaluations  # else each worker evaluates the whole of batches
        if evaluations is not None:
            evaluations.adopt(model)
        reading = self._reading_along(batch_axis)
        for name in ("fit",) if self._fits is None and reading is None else SHOW_PROGRESS:
            vars(model)[name] = hiding_own_frames(self._method(model, name, reading, evaluations))

    def _reading_along(self, batch_axis: BatchAxis) -> Reading | None:
        """How this worker reads its part of batches that are split so."""
        reading = self._reading
        if reading is None or not batch_axis:
            return reading
        if reading.files is not None:
            raise reading.files.refused(
                "batch_axis says that examples lie along other axes than the first, along which data sets make "
                "batches of them; allowed: no batch_axis, or no `shard`."
            )
        return replace(reading, rows=None)  # rows are not what is split, or not all of it

    def _method(
        self, model: keras.Model, name: str, reading: Reading | None, evaluations: Evaluations | None
    ) -> Callable[..., Any]:
        """A model's `fit`, `evaluate` or `predict`, as the script is to call it."""
        method = getattr(type(model), name).__get__(model)
        if self._fits is not None:
            method = self._fits.wrapped(method)
        if reading is not None:
            method = reading_own_batches(method, model, reading)
        if name != "fit":
            return method if evaluations is None else evaluations.noting_interrupts(method, model)
        are_known = reading is None or reading.files is None  # else a part is of any length
        return self._around_fit(noting_lengths(method, model) if are_known else method)

    def _train_function(self, model: keras.Model, batch_axis: BatchAxis) -> Callable[[Iterator[Any]], Any]:
        @ours
        def train_step(data: Any) -> Any:
            return converting(model.train_step)(data)

        of_batches = self._distribute(train_step, model.jit_compile, batch_axis)
        batches = timing_the_start(of_batches, model), of_batches

        @functools.cache
        def parts() -> tuple[Callable[[Any], Any], TracedStep]:
            of_parts = self._distribute(train_step, model.jit_compile, batch_axis, is_own=True)
            return timing_the_start(of_parts, model), of_parts

        def train(iterator: Iterator[Any]) -> Any:
            step, distributed = parts() if isinstance(iterator, PartsIterator) else batches
            distributed.coming = lengths_to_come(model)
            with _explaining_graphs(model):
                first = next_given(iterator)
                data, distributed.whole = first
                if not distributed.traces:
                    make_state(model, data)
                is_about_to_step(model)
                if model.steps_per_execution > 1 and distributed.traces and distributed.reads_ahead:
                    return on_several(distributed, first, iterator, model.steps_per_execution)
                logs = step(data)
                for _ in range(model.steps_per_execution - 1):
                    try:
                        data, distributed.whole = next_given(iterator)
                    except StopIteration:
                        break
                    logs = step(data)
            return logs

        takes_parts(train)
        return train


def _check(model: keras.Model) -> None:
    require_no_strategy(model.distribute_strategy, model.name)
    if model.run_eagerly:
        log.warning(
            "%s is compiled with run_eagerly=True; AutoDist compiles its steps all the same, since what is distributed "
            "is their graph.", model.name, extra=ALIKE_EVERYWHERE,
        )  # fmt: skip


@contextmanager
def _explaining_graphs(model: keras.Model) -> Iterator[None]:
    """Adds to an error of a step that the step is a graph, where the script asks for eager execution."""
    try:
        yield
    except Exception as error:
        if model.run_eagerly and not isinstance(error, StopIteration):
            error.add_note(
                f"{model.name} is compiled with run_eagerly=True, and AutoDist compiles its steps all the same: there "
                "tensors have no values yet. What needs values (x.numpy(), say) can stand in tf.py_function or in a "
                "callback; tf.print prints them."
            )
        raise
