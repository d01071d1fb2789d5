"""Overwrites: Keras variables whose "gradient" is their new value (float8)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import keras

from autodist.tf_compat.patches import OPTIMIZER_OVERWRITE, patched


@contextmanager
def recording_overwrites() -> Iterator[list[Any]]:
    """Yields the list of handles of the variables that Keras's optimizers overwrite while the context is open."""
    handles: list[Any] = []

    def overwrite(plain: Any, optimizer: keras.Optimizer, gradients: Iterable[Any], variables: Iterable[Any]) -> Any:
        variables = list(variables)
        handles.extend(v.value.handle for v in variables if getattr(v, "overwrite_with_gradient", False))
        return plain(optimizer, gradients, variables)

    with patched({OPTIMIZER_OVERWRITE: overwrite}):
        yield handles
