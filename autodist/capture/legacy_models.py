"""Front end of Keras 2 (tf_keras): models compiled in a scope train through AutoDist, as those of Keras 3 do."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from autodist.capture.adopted_models import AdoptedModels, BatchAxis, explaining_graphs
from autodist.capture.fit_lengths import lengths_to_come
from autodist.capture.keras_batches import next_given, on_several
from autodist.capture.keras_libraries import legacy_keras, steps_per_execution
from autodist.capture.keras_progress import timing_the_start
from autodist.converting import converting, ours
from autodist.errors import CaptureError


class LegacyModels(AdoptedModels):
    """Lets models of tf_keras train through steps that `distribute` makes.

    What the class of a model makes by `make_train_function` is the step, traced with an iterator of one batch: that of
    tf_keras, which calls `train_step`, or one of the script's own.
    """

    versions = ("tf_keras", "2.18")

    @property
    def kind(self) -> Any:
        """The class of all models."""
        legacy = legacy_keras()
        assert legacy is not None, "its models are adopted once it is imported"
        return legacy.Model

    def adopt(self, model: Any) -> None:
        """Gives one model a train function of ours, unless it is built for a session."""
        if tf.executing_eagerly():
            super().adopt(model)

    def adopt_and_make(self, make: Callable[..., Any]) -> Callable[..., Any]:
        """The method of the class that makes a train function: the model is adopted, and makes ours."""
        adopt_and_make = super().adopt_and_make(make)

        @functools.wraps(make)
        def make_train_function(model: Any, force: bool = False) -> Any:
            is_asked_by_us = _IS_MADE in vars(model) or not tf.executing_eagerly()
            return (make if is_asked_by_us else adopt_and_make)(model, force)

        return make_train_function

    def train_function(self, model: Any, batch_axis: BatchAxis) -> Callable[[Iterator[Any]], Any]:
        """What trains a model on the next batches of an iterator, and returns the last one's logs."""
        distributed = self._distribute(one_batch_step(model, "train"), bool(model.jit_compile), batch_axis)
        step = timing_the_start(distributed, model)

        def train(iterator: Iterator[Any]) -> Any:
            distributed.coming = lengths_to_come(model)
            steps = steps_per_execution(model)
            with explaining_graphs(model):
                first = next_given(iterator)
                if steps > 1 and distributed.traces and distributed.reads_ahead:
                    return on_several(distributed, first, iterator, steps)
                logs = step(first[0])
                for _ in range(steps - 1):
                    try:
                        data, _ = next_given(iterator)
                    except StopIteration:
                        break
                    logs = step(data)
            return logs

        return train


_IS_MADE = "_autodist_makes_a_function"
"""A model has it while its class makes a function of one batch for us."""


def one_batch_step(model: Any, name: str) -> Callable[[Any], Any]:
    """What the class of a model makes by `make_train_function`, or such, as a function of one batch.

    Args:
        model: of tf_keras.
        name: "train", "test" or "predict".
    """
    of_iterator = plain_function(model, name)
    maker = f"{type(model).__name__}.make_{name}_function"

    @ours
    def step(data: Any) -> Any:
        return converting(of_iterator)(_OneBatch(data, maker))

    step.__name__ = f"{name}_step"
    return step


def plain_function(model: Any, name: str) -> Callable[[Any], Any]:
    """What the class of a model makes by `make_train_function`, or such: a function of an iterator, for one batch."""
    with _for_one_batch(model):
        setattr(model, f"{name}_function", None)
        try:
            return getattr(type(model), f"make_{name}_function")(model)
        finally:
            setattr(model, f"{name}_function", None)
            model.train_tf_function = None  # TensorBoard would look for its graph, which is traced here alone


@contextmanager
def _for_one_batch(model: Any) -> Iterator[None]:
    """While it is open, what is made for a model makes one step in a call."""
    several, vars(model)["_steps_per_execution"] = model._steps_per_execution, None
    vars(model)[_IS_MADE] = True
    try:
        yield
    finally:
        del vars(model)[_IS_MADE]
        vars(model)["_steps_per_execution"] = several


class _OneBatch:
    """The iterator with which a function of an iterator is traced.

    Args:
        data: the batch.
        maker: what has made the function.
    """

    def __init__(self, data: Any, maker: str) -> None:
        self._data, self._maker, self._has_given = data, maker, False

    def __iter__(self) -> _OneBatch:
        return self

    def __next__(self) -> Any:
        if self._has_given:
            raise CaptureError(
                f"the function that {self._maker} makes takes more than one batch in a call, and a step that is "
                "distributed is of one. Let it take one, and say compile(steps_per_execution=...) for several steps in "
                "a call; gradients of several batches are added up in variables of the model."
            )
        self._has_given = True
        return self._data
