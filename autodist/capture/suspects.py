"""Suspects: a few variables with gradients, whose values show if the gradients were applied."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

SUSPECTS = 4
"""Number of variables, the smallest of each gradient call, whose values are compared."""

_LARGE = 1 << 14


@dataclass(frozen=True)
class Suspect:
    """A variable with a gradient, and its value at that time; None if it had none yet.

    Small variables are kept alive: a model that is trained in a function may leave no other trace.
    """

    variable: Callable[[], Any]
    value: np.ndarray | None

    @property
    def has_changed(self) -> bool:
        """True if the value has changed, or one of the two values is unknown."""
        now = self._now()
        return self.value is None or now is None or not np.array_equal(self.value, now)

    @property
    def is_known_to_have_changed(self) -> bool:
        """True if both values are known and differ."""
        now = self._now()
        return self.value is not None and now is not None and not np.array_equal(self.value, now)

    def _now(self) -> np.ndarray | None:
        variable = self.variable()
        return None if variable is None else _value_of(variable)


def suspects_of(sources: Sequence[Any]) -> list[Suspect]:
    """Returns the smallest variables among the sources of gradients."""
    variables = sorted({id(s): s for s in sources if _size(s) is not None}.values(), key=lambda v: _size(v) or 0)
    return [Suspect(_kept(v), _value_of(v)) for v in variables[:SUSPECTS]]


def plain_variable(source: Any) -> Any:
    """Returns the TensorFlow variable of a Keras variable; other sources as they are."""
    return source.value if isinstance(source, keras.Variable) else source


def _size(source: Any) -> int | None:
    """Returns the number of elements of a variable with a known shape; None for other sources."""
    if not isinstance(source, tf.Variable | keras.Variable) or source.shape is None:
        return None
    return math.prod(n or 0 for n in tf.TensorShape(source.shape).as_list())


def _kept(variable: Any) -> Callable[[], Any]:
    return (lambda: variable) if (_size(variable) or 0) < _LARGE else weakref.ref(variable)


def _value_of(variable: Any) -> np.ndarray | None:
    """Returns a variable's value, or two sums of a large one's; None if it has none yet."""
    plain = plain_variable(variable)
    with tf.init_scope():
        handle = getattr(plain, "handle", None)
        if not isinstance(handle, tf.Tensor) or not tf.executing_eagerly() or not hasattr(handle, "numpy"):
            return None
        if not tf.raw_ops.VarIsInitializedOp(resource=handle):
            return None
        value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=plain.dtype.base_dtype)
        if (_size(variable) or 0) >= _LARGE:
            value = tf.cast(value, tf.float64)
            value = tf.stack([tf.reduce_sum(value), tf.reduce_sum(value * value)])
        return np.asarray(value)
