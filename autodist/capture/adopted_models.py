"""Common parts of the front ends for Keras 3 and tf_keras: models in a scope train and evaluate through AutoDist."""

from __future__ import annotations

import functools
import inspect
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, TypeVar

import keras

from autodist.capture.fit_arguments import recording_lengths
from autodist.capture.keras_distribution import check_current_distribution
from autodist.capture.keras_evaluations import Evaluations
from autodist.capture.keras_fits import SHOW_PROGRESS, Fits
from autodist.capture.keras_progress import TracedStep
from autodist.capture.other_strategies import require_no_strategy
from autodist.capture.patches import Patch, patched
from autodist.capture.train_functions import is_making, own_maker, set_maker
from autodist.logs.terminal import ALIKE_EVERYWHERE

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
    """

    def __init__(
        self,
        distribute: StepMaker,
        fits: Fits | None = None,
        evaluations: Evaluations | None = None,
        around_fit: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda fit: fit,
    ) -> None:
        self._distribute, self._fits, self._evaluations = distribute, fits, evaluations
        self._around_fit = around_fit
        self._batch_axis: BatchAxis = {}

    patches: Mapping[str, Patch]
    """The rows of the methods that are wrapped in the classes of models, by the names of the methods."""

    @abstractmethod
    def train_function(self, model: Any, batch_axis: BatchAxis) -> Callable[[Iterator[Any]], Any]:
        """Returns a function that trains a model on an iterator's next batches and returns the logs of the last one."""

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
            **dict.fromkeys(SHOW_PROGRESS if self._fits is not None else ("fit",), hiding_own_frames(self._fit)),
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
        bound = method.__get__(model)
        ours = self._fits.wrapped(bound) if self._fits is not None else bound
        return (self._around_fit(ours) if method.__name__ == "fit" else ours)(*args, **kwargs)

    def adopt(self, model: Any) -> None:
        """Sets a distributed train function on one model, which keeps it after the scope."""
        batch_axis = self._batch_axis

        def make_train_function(force: bool = False) -> Any:
            if is_making(model):  # the script's own function calls the one that it found on the model
                return type(model).make_train_function(model, force)
            if model.train_function is None or force:
                _check(model)
                model.train_function = self.train_function(model, batch_axis)
            return model.train_function

        set_maker(model, "train", make_train_function)
        model.train_function = None
        evaluations = None if batch_axis else self._evaluations  # with axes, each worker evaluates all of each batch
        if evaluations is not None:
            evaluations.adopt(model)
        for name in self.called(batch_axis):
            vars(model)[name] = hiding_own_frames(self._method(model, name, batch_axis, evaluations))

    def called(self, batch_axis: BatchAxis) -> tuple[str, ...]:
        """Returns the names of the methods that are wrapped on a model."""
        return SHOW_PROGRESS if self._fits is not None else ("fit",)

    def reads(self, model: Any, method: Callable[..., Any], batch_axis: BatchAxis) -> Callable[..., Any]:
        """Returns a model's `fit`, `evaluate` or `predict`, which may read only a part of its batches."""
        return method

    def knows_lengths(self, batch_axis: BatchAxis) -> bool:
        """Returns True if the batches of a step have the lengths that follow from the data of `fit`."""
        return True

    def _method(self, model: Any, name: str, batch_axis: BatchAxis, evaluations: Evaluations | None) -> Any:
        """Returns the wrapped `fit`, `evaluate` or `predict` of a model."""
        method = _looked_up(model, name)
        if self._fits is not None:
            method = self._fits.wrapped(method)
        method = self.reads(model, method, batch_axis)
        if name != "fit":
            return method if evaluations is None else evaluations.noting_interrupts(method, model)
        return self._around_fit(recording_lengths(method, model) if self.knows_lengths(batch_axis) else method)


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
    check_current_distribution()
    if model.run_eagerly:
        log.warning(
            "%s is compiled with run_eagerly=True; AutoDist compiles its steps all the same, since it distributes "
            "their graph.", model.name, extra=ALIKE_EVERYWHERE,
        )  # fmt: skip


@contextmanager
def explaining_graphs(model: Any) -> Iterator[None]:
    """Adds a note to errors of a step of an eager model: the step runs as a graph."""
    try:
        yield
    except Exception as error:
        if model.run_eagerly and not isinstance(error, StopIteration):
            error.add_note(
                f"{model.name} is compiled with run_eagerly=True, and AutoDist compiles its steps all the same: there "
                "tensors have no values yet. Code that needs values (x.numpy(), say) can run in tf.py_function or in a "
                "callback; tf.print prints them."
            )
        raise


_OWN_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep

_Method = TypeVar("_Method", bound=Callable[..., Any])


def hiding_own_frames(method: _Method) -> _Method:
    """Wraps a method so that its errors show no frames of AutoDist, as Keras does for its own frames.

    `keras.config.disable_traceback_filtering()` shows all frames.
    """

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except Exception as error:
            if keras.config.is_traceback_filtering_enabled():
                error.__traceback__ = _without_own_frames(error.__traceback__)
            raise

    return call  # type: ignore[return-value]


def _without_own_frames(trace: TracebackType | None) -> TracebackType | None:
    kept: TracebackType | None = None
    frames: list[TracebackType] = []
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    for one in reversed(frames):
        if not one.tb_frame.f_code.co_filename.startswith(_OWN_FOLDER):
            kept = TracebackType(kept, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return kept
