"""Python functions that a graph calls by `tf.py_function` or `tf.numpy_function`, and the mark `ad.elementwise`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import script_ops  # holds the functions of py_function and numpy_function

_MARK = "_autodist_elementwise"


def elementwise(function: Callable[..., Any]) -> Callable[..., Any]:
    """Marks a function whose result for an element does not depend on earlier calls; returns the marked function.

    Args:
        function: a function as `tf.py_function` or `tf.numpy_function` takes it.

    Raises:
        TypeError: the function is not callable.
    """
    if not _is_function(function):
        raise TypeError(
            f"ad.elementwise got {function!r}; pass the Python function that tf.py_function or tf.numpy_function "
            "calls for each element."
        )

    def call(*args: Any) -> Any:
        return function(*args)

    marked = tf.autograph.experimental.do_not_convert(functools.update_wrapper(call, function))
    setattr(marked, _MARK, True)
    return marked


def _is_function(value: object) -> bool:
    return callable(value) and not isinstance(value, type)


def is_elementwise(node: tf.compat.v1.NodeDef) -> bool:
    """True if a node calls a Python function that the script has marked."""
    function = _called_by(node)
    return function is not None and getattr(function, _MARK, False)


def name_called(node: tf.compat.v1.NodeDef) -> str | None:
    """Returns the name of the Python function that a node calls; None if it calls none."""
    function = _called_by(node)
    return None if function is None else getattr(function, "__name__", type(function).__name__)


def marked_call(node: tf.compat.v1.NodeDef) -> str:
    """Returns the text for a message that shows how to mark the Python function that a node calls."""
    called = name_called(node) or ""
    marked = called if called.isidentifier() else "function"
    caller = "tf.py_function" if node.op == "EagerPyFunc" else "tf.numpy_function"
    return f"ad.elementwise({marked}) in the call of {caller}"


def _called_by(node: tf.compat.v1.NodeDef) -> Any:
    if "token" not in node.attr:
        return None
    registered = script_ops._py_funcs._funcs.get(node.attr["token"].s.decode())
    return getattr(registered, "_func", registered)
