"""Variables of Keras that are created without their initial values, which are computed when they are needed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import tensorflow as tf

from autodist.capture.keras.distribution.run_settings import current_run
from autodist.runtime.deferred_values import defer
from autodist.runtime.variables import LARGE
from autodist.tf_compat.patches import VARIABLE_INITIALIZER, install

_OF_KERAS = "keras.src.initializers."
"""Prefix of the modules of Keras's own initializers, whose values follow from their options and the seed."""


@functools.cache
def defer_initial_values() -> None:
    """Defers the values of Keras's large variables from now on, in runs whose strategy divides variables."""
    from keras.src.backend.config import backend

    if backend() == "tensorflow":
        install(VARIABLE_INITIALIZER, _initialize)


def _initialize(plain: Callable[..., None], variable: Any, initializer: Callable[..., Any]) -> None:
    """Wraps the method by which a Keras variable is set to the value of an initializer."""
    run = current_run()
    dtype, shape = tf.as_dtype(variable._dtype), tuple(variable._shape)
    if run is None or not run.divides_variables or prod(shape) * dtype.size < LARGE or not _can_defer(initializer):
        plain(variable, initializer)
        return

    def compute() -> tf.Tensor:
        return tf.convert_to_tensor(initializer(shape, dtype=variable._dtype), dtype)

    def empty(shape: Sequence[int], dtype: str) -> tf.Tensor:
        """Returns memory that is not written, and which the system therefore need not provide."""
        return tf.raw_ops.Empty(shape=shape, dtype=dtype)

    with tf.init_scope():  # as TensorFlow does for variables that functions make, such as slots in a custom step
        plain(variable, empty)
        defer(variable._value, compute)


def _can_defer(initializer: Any) -> bool:
    """Returns True if each call of an initializer returns the same value, and none draws from a state."""
    with tf.init_scope():
        is_eager = tf.executing_eagerly()
    if not is_eager or not type(initializer).__module__.startswith(_OF_KERAS):
        return False
    return isinstance(getattr(initializer, "seed", 0), int)
