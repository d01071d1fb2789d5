"""Overwrites: variables of Keras for which what stands in a gradient's place is their new value (float8)."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import keras

from autodist.capture.patches import definer_of, replaced

_METHOD = "_overwrite_variables_directly_with_gradients"


@contextmanager
def noting_overwrites() -> Iterator[list[Any]]:
    """The handles of the variables that Keras's optimizers overwrite with their gradients while the context is open."""
    handles: list[Any] = []
    definer = definer_of(keras.Optimizer, _METHOD)
    plain = getattr(definer, _METHOD)

    @functools.wraps(plain)
    def overwrite(optimizer: keras.Optimizer, gradients: Iterable[Any], variables: Iterable[Any]) -> Any:
        variables = list(variables)
        handles.extend(v.value.handle for v in variables if getattr(v, "overwrite_with_gradient", False))
        return plain(optimizer, gradients, variables)

    with replaced(definer, _METHOD, overwrite):
        yield handles
