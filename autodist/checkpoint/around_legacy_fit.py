"""`fit` of tf_keras as it is called: what it cannot do is refused, and Ctrl-C is noted."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from autodist.capture.bound_calls import argument, with_bound_arguments
from autodist.capture.keras_fits import callbacks_in
from autodist.checkpoint.keras_callback import CheckpointCallback
from autodist.errors import CheckpointError
from autodist.reading.input_shard import InputShard


class AroundLegacyFit:
    """Wraps the `fit` of a model of tf_keras.

    Args:
        share: of this worker in the data.
        saves: whether the YAML asks for checkpoints.
        noting_interrupts: is entered around each call.
    """

    def __init__(
        self, share: InputShard, saves: bool, noting_interrupts: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._share, self._saves, self._noting_interrupts = share, saves, noting_interrupts

    def __call__(self, fit: Callable[..., Any]) -> Callable[..., Any]:
        """`fit`, bound to its model, as the script is to call it."""

        def call(bound: inspect.BoundArguments) -> Any:
            self._share.require_no_files("fit of tf_keras reads whole batches on every worker")
            given = callbacks_in(argument(bound, "callbacks"))
            if self._saves or any(isinstance(callback, CheckpointCallback) for callback in given):
                what = "`checkpoint` in the YAML" if self._saves else "ad.checkpoint_callback"
                raise CheckpointError(
                    f"{what} does not know the epoch and batch of a `fit` of tf_keras. Pass it "
                    "tf_keras.callbacks.BackupAndRestore(folder), or train with Keras 3."
                )
            with self._noting_interrupts():
                return fit(*bound.args, **bound.kwargs)

        return with_bound_arguments(fit, call)
