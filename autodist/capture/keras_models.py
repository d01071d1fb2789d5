"""Front end of Keras 3: models compiled in a scope train through AutoDist, `fit` and all that stands around it kept."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
from keras import tree

from autodist.capture.keras_progress import TracedStep, timing_the_start
from autodist.errors import CaptureError

log = logging.getLogger("autodist")

StepMaker = Callable[[Callable[..., Any], bool], TracedStep]
"""Makes of a Keras `train_step`, a function of one batch, one that trains on all replicas; compiled by XLA or not."""

_SHOWS_PROGRESS = ("fit", "evaluate", "predict")
_WRITE_FILES = (keras.callbacks.ModelCheckpoint, keras.callbacks.BackupAndRestore, keras.callbacks.CSVLogger)


class KerasModels:
    """Lets models train through steps that `distribute` makes.

    Args:
        distribute: makes a distributed step of a model's `train_step`.
        shows_progress: whether this worker shows Keras's progress bars.
    """

    def __init__(self, distribute: StepMaker, shows_progress: bool) -> None:
        self._distribute, self._shows_progress = distribute, shows_progress

    @contextmanager
    def adopting(self) -> Iterator[None]:
        """Adopts every model that is built, compiled or fitted while the context is open."""
        # Where Keras defines them: a model counts as one with a `compile` of its own, which loading a file leaves
        # uncompiled, if `keras.Model.compile` is not the function that stands there.
        compiles, trains = _definer("compile"), _definer("make_train_function")
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

        compiles.compile, trains.make_train_function, trains.__init__ = (
            compile_and_adopt,
            adopt_and_make,
            build_and_adopt,
        )
        try:
            yield
        finally:
            compiles.compile, trains.make_train_function, trains.__init__ = compile_model, make_train, build

    def adopt(self, model: keras.Model) -> None:
        """Gives one model a train function of ours; it keeps it after the scope."""

        def make_train_function(force: bool = False) -> Any:
            if model.train_function is None or force:
                _check(model)
                model.train_function = self._train_function(model)
            return model.train_function

        vars(model)["make_train_function"] = make_train_function
        model.train_function = None
        if not self._shows_progress:
            for name in _SHOWS_PROGRESS:
                vars(model)[name] = _of_another_worker(getattr(type(model), name).__get__(model))

    def _train_function(self, model: keras.Model) -> Callable[[Iterator[Any]], Any]:
        def train_step(data: Any) -> Any:
            return model.train_step(data)

        step = timing_the_start(self._distribute(train_step, model.jit_compile), model)

        def train(iterator: Iterator[Any]) -> Any:
            logs = step(next(iterator))
            for _ in range(model.steps_per_execution - 1):
                try:
                    data = next(iterator)
                except StopIteration:
                    break
                logs = step(data)
            return logs

        return train


def _definer(method: str) -> Any:
    """The class from which `keras.Model` has `method`."""
    return next(base for base in keras.Model.__mro__ if method in vars(base))


def _check(model: keras.Model) -> None:
    if model.run_eagerly:
        raise CaptureError(
            f"{model.name} is compiled with run_eagerly=True, and a step that is never a graph cannot be distributed. "
            "Compile it without."
        )


def _of_another_worker(method: Callable[..., Any]) -> Callable[..., Any]:
    """`method` as workers that are not the chief call it: without its progress bar, however `verbose` was passed."""
    signature = inspect.signature(method)

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.arguments["verbose"] = 0
        _warn_of_files(bound.arguments.get("callbacks"))
        return method(*bound.args, **bound.kwargs)

    return call


def _warn_of_files(callbacks: Any) -> None:
    """Says that files are written here as well as by the chief: on one machine they may be the same files."""
    given = callbacks.callbacks if isinstance(callbacks, keras.callbacks.CallbackList) else tree.flatten(callbacks)
    writers = sorted({type(callback).__name__ for callback in given if isinstance(callback, _WRITE_FILES)})
    if writers:
        log.warning(
            "fit is given %s here too, and workers on one machine then write the same files at the same time. "
            "Pass them where ad.is_chief is true, or give each worker a path of its own (by ad.worker_index).",
            " and ".join(writers),
        )
