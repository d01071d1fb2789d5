"""Wraps calls of `fit`: adds the callback of the YAML, moves saving callbacks to the end, and notes Ctrl-C.

A model and its metrics are built before their values are restored: Keras builds some in the first step only.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import keras
import tensorflow as tf
from keras import tree

from autodist.capture.keras.call_arguments import argument, set_argument, with_bound_arguments
from autodist.capture.keras.fits import callbacks_in
from autodist.capture.keras.model_state import build_optimizer, has_known_outputs
from autodist.checkpoint.automatic import AutomaticCheckpoints
from autodist.checkpoint.keras_callback import CheckpointCallback
from autodist.errors import CheckpointError
from autodist.logs.formatting import words_of
from autodist.reading.input_shard import InputShard
from autodist.tf_compat.patches import EPOCH_DATA, patched

log = logging.getLogger("autodist")


class AroundFit:
    """Wraps a model's `fit`.

    Args:
        automatic: automatic checkpoints of the YAML; None: not configured.
        callback: saves each `fit` as configured in the YAML; None: not configured.
        noting_interrupts: context manager around each call.
    """

    def __init__(
        self,
        automatic: AutomaticCheckpoints | None,
        callback: CheckpointCallback | None,
        noting_interrupts: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._automatic, self._callback, self._noting_interrupts = automatic, callback, noting_interrupts
        self._under_way: set[int] = set()

    def __call__(self, fit: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a `fit` that is bound to its model."""
        key = id(_model_of(fit))

        def call(bound: inspect.BoundArguments) -> Any:
            if key in self._under_way:
                return fit(*bound.args, **bound.kwargs)
            callbacks, restores = self._in_order(argument(bound, "callbacks"), argument(bound, "epochs") or 1)
            set_argument(bound, "callbacks", callbacks)
            self._under_way.add(key)
            try:
                with self._noting_interrupts(), _building_models() if restores else nullcontext():
                    return self._saved(fit, bound)
            finally:
                self._under_way.discard(key)

        return with_bound_arguments(fit, call)

    def _saved(self, fit: Callable[..., Any], bound: inspect.BoundArguments) -> Any:
        if self._automatic is None:
            return fit(*bound.args, **bound.kwargs)
        self._automatic.is_in_fit = True
        try:
            return fit(*bound.args, **bound.kwargs)
        finally:
            self._automatic.is_in_fit = False

    def _in_order(self, passed: Any, epochs: int) -> tuple[Any, bool]:
        """Returns the callbacks, those that save last, and True if one of them restores values in this `fit`."""
        is_list = isinstance(passed, keras.callbacks.CallbackList)
        listed = [c for c in (passed.callbacks if is_list else tree.flatten(passed)) if c is not None]
        saving = [c for c in listed if isinstance(c, CheckpointCallback)]
        if self._callback is not None and all(c.folder != self._callback.folder for c in saving):
            saving.append(self._callback)
        if not saving:
            return passed, False
        others = [c for c in listed if not isinstance(c, CheckpointCallback)]
        for callback in saving:
            callback.others = [c for c in others if not isinstance(c, keras.callbacks.History)]
            callback.before_fit(epochs)
        restores = any(callback.restores for callback in saving)
        if not is_list:
            return [*others, *saving], restores
        if self._callback is not None and self._callback not in listed:
            self._callback.set_model(passed.model)
            self._callback.set_params(passed.params)
        passed.callbacks[:] = [*others, *saving]  # Keras uses such a list unchanged
        return passed, restores


def _model_of(fit: Any) -> Any:
    """Returns the model of a bound `fit`, below any number of wrappers."""
    while not hasattr(fit, "__self__"):
        fit = fit.__wrapped__
    return fit.__self__


@contextmanager
def _building_models() -> Iterator[None]:
    """Context of a `fit` that restores values: the model is built when Keras has prepared the data.

    Raises:
        CheckpointError: the model cannot be built without a batch.
    """

    def build(plain: Callable[..., Any], model: keras.Model, iterator: Any = None, data_batch: Any = None) -> Any:
        if iterator is not None:
            batch = _spec_of(iterator)
            if not model.built:
                _build(model, batch)
            _build_metrics(model, batch)
        return plain(model, iterator, data_batch)

    with patched({EPOCH_DATA: build}):
        yield


def _spec_of(iterator: Any) -> Any:
    """Returns the specs of a batch of Keras's iterator."""
    batches = iterator._distributed_dataset
    if not hasattr(batches, "element_spec"):  # this worker's part
        batches = iterator.data_adapter.get_tf_dataset()
    return batches.element_spec


def _build(model: keras.Model, batch: Any) -> None:
    """Builds a model by a trace, as its first step would, so that variables have the same names."""
    inputs, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
    try:
        tf.function(lambda x: model(x, training=True), autograph=False).get_concrete_function(inputs)
    except Exception as error:
        raise CheckpointError(
            f"{model.name} is not built, so values cannot be restored, and it cannot be called without a batch "
            f"({type(error).__name__}: {words_of(error)}). Build it before `fit`, for example by a call on a batch."
        ) from error


def _build_metrics(model: keras.Model, batch: Any) -> None:
    """Builds the metrics of a subclassed model; those of others are built from its outputs before the first step."""
    metrics = model._compile_metrics
    if metrics is None or metrics.built or has_known_outputs(model):
        return
    build_optimizer(model)  # otherwise, Keras would do so under other names than in the first step
    try:
        model._symbolic_build(data_batch=batch)
    except Exception as error:  # noqa: BLE001 - whatever the model raises, it can train
        log.info(
            "the metrics of %s cannot be built before its first step (%s: %s).",
            model.name, type(error).__name__, words_of(error),
        )  # fmt: skip


class AroundLegacyFit:
    """Wraps the `fit` of a tf_keras model.

    Args:
        share: this worker's shard of the input.
        saves: True if the YAML configures checkpoints.
        noting_interrupts: context manager around each call.
    """

    def __init__(
        self, share: InputShard, saves: bool, noting_interrupts: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._share, self._saves, self._noting_interrupts = share, saves, noting_interrupts

    def __call__(self, fit: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a `fit` that is bound to its model."""

        def call(bound: inspect.BoundArguments) -> Any:
            self._share.require_no_files("fit of tf_keras reads whole batches on every worker")
            listed = callbacks_in(argument(bound, "callbacks"))
            if self._saves or any(isinstance(callback, CheckpointCallback) for callback in listed):
                feature = "`checkpoint` in the YAML" if self._saves else "ad.checkpoint_callback"
                raise CheckpointError(
                    f"{feature} cannot save the epoch and batch of a `fit` of tf_keras. Pass it "
                    "tf_keras.callbacks.BackupAndRestore(folder), or train with Keras 3."
                )
            with self._noting_interrupts():
                return fit(*bound.args, **bound.kwargs)

        return with_bound_arguments(fit, call)
