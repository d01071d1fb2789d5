"""Wraps calls of `fit`: adds the callback of the YAML, moves saving callbacks to the end, and notes Ctrl-C."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import keras
from keras import tree

from autodist.capture.keras.call_arguments import argument, set_argument, with_bound_arguments
from autodist.capture.keras.fits import callbacks_in
from autodist.checkpoint.automatic import AutomaticCheckpoints
from autodist.checkpoint.build_model import building_models
from autodist.checkpoint.keras_callback import CheckpointCallback
from autodist.errors import CheckpointError
from autodist.reading.input_shard import InputShard


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
                with self._noting_interrupts(), building_models() if restores else nullcontext():
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
