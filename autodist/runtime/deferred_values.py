"""Deferred values: values of variables that are computed when they are first needed, instead of being held until then.

A model that a strategy divides is built without its large values. The first step computes one after the other, and each
worker keeps its slices. If Python reads such a variable before, its value is computed, and its object holds it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import tensorflow as tf

from autodist.runtime.eager_watch import Watcher, unwatched, watch

_NOTE = "_autodist_deferred_value"
"""Attribute of a `tf.Variable`: its `DeferredValue`."""


class DeferredValue:
    """The value of a variable whose object holds an empty one.

    Args:
        compute: returns the value; each call returns the same one.
    """

    def __init__(self, compute: Callable[[], tf.Tensor]) -> None:
        self._compute = compute
        self._end: Callable[[], object] = lambda: None
        self._hold: Callable[[], None] = lambda: None

    def compute(self) -> tf.Tensor:
        """Returns the value."""
        with tf.init_scope():
            return self._compute()

    def watch(self, variable: tf.Variable) -> None:
        """Computes the value for the variable when it is read, and forgets the value when it is written."""
        known = weakref.ref(variable)  # else a variable that the script drops would stay
        self._hold = lambda: _set(known)
        end = watch(variable, Watcher(self._hold, lambda: _discard(known), self._hold))
        # The watch must end before the identities of the variable and of its handle belong to other objects.
        self._end = finalizer = weakref.finalize(variable, end)
        finalizer.atexit = False

    def hold(self) -> None:
        """Computes the value for the variable, unless that has another value now."""
        self._hold()

    def discard(self) -> None:
        """Ends the watch."""
        self._hold = lambda: None
        self._end()


def defer(variable: tf.Variable, compute: Callable[[], tf.Tensor]) -> DeferredValue:
    """Writes a value to an eager variable that is computed when it is needed; frees the present value. Returns it.

    Args:
        variable: the variable. No data set has captured it.
        compute: returns the value, of the variable's shape and dtype; each call returns the same one.
    """
    discard(variable)
    empty = tf.zeros([0], variable.dtype.base_dtype)
    tf.raw_ops.AssignVariableOp(resource=variable.handle, value=empty)
    later = DeferredValue(compute)
    setattr(variable, _NOTE, later)
    later.watch(variable)
    return later


def deferred(variable: tf.Variable) -> DeferredValue | None:
    """Returns the value of a variable whose object does not hold it; None if the object does."""
    found: DeferredValue | None = getattr(variable, _NOTE, None)
    return found


def discard(variable: tf.Variable) -> None:
    """Forgets the deferred value of a variable, if it has one: the variable has another value now."""
    found = deferred(variable)
    if found is not None:
        found.discard()
        setattr(variable, _NOTE, None)


def _discard(known: weakref.ref[tf.Variable]) -> None:
    variable = known()
    if variable is not None:
        discard(variable)


def _set(known: weakref.ref[tf.Variable]) -> None:
    """Computes the value of a variable, which then holds it."""
    variable = known()
    if variable is not None and (found := deferred(variable)) is not None:
        with unwatched():
            tf.raw_ops.AssignVariableOp(resource=variable.handle, value=found.compute())
        discard(variable)
