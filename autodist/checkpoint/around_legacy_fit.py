"""`fit` of tf_keras as it is called: what it cannot do is refused, and Ctrl-C is noted."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from autodist.capture.keras_fits import argument, callbacks_in
from autodist.checkpoint.keras_callback import CheckpointCallback
from autodist.errors import CheckpointError
from autodist.own_share import OwnShare


class AroundLegacyFit:
    """Wraps the `fit` of a model of tf_keras.

    Args:
        share: of this worker in the data.
        saves: whether the YAML asks for checkpoints.
        noting_interrupts: is entered around each call.
    """

    def __init__(
        self, share: OwnShare, saves: bool, noting_interrupts: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._share, self._saves, self._noting_interrupts = share, saves, noting_interrupts

    def __call__(self, fit: Callable[..., Any]) -> Callable[..., Any]:
        """`fit`, bound to its model, as the script is to call it."""
        signature = inspect.signature(fit)

        @functools.wraps(fit)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                bound = signature.bind(*args, **kwargs)
            except TypeError:
                return fit(*args, **kwargs)  # which says so itself
            self._share.require_no_files("fit of tf_keras reads whole batches on every worker")
            given = callbacks_in(argument(bound, "callbacks"))
            if self._saves or any(isinstance(callback, CheckpointCallback) for callback in given):
                what = "`checkpoint` in the YAML" if self._saves else "ad.checkpoint_callback"
                raise CheckpointError(
                    f"{what} does not know the epoch and batch of a `fit` of tf_keras. Pass it "
                    "tf_keras.callbacks.BackupAndRestore(folder), or train with Keras 3."
                )
            with self._noting_interrupts():
                return fit(*args, **kwargs)

        return call
