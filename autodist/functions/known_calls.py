"""Forms of calls: the analysis of one call is valid for all calls that differ only in the values of their arrays."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np
from tensorflow.python.framework.ops import EagerTensor  # the class of all eager tensors

from autodist.tf_compat import plain_nests
from autodist.tf_compat.plain_nests import NotPlainError

_PLAIN = frozenset({type(None), bool, int, float, str, bytes})


def form_of(arguments: Any) -> tuple[Hashable | None, list[Any]]:
    """Returns the form of a call, equal for calls that differ only in the values of their arrays, and these arrays.

    The form is the structure of the arguments, with shapes, dtypes, and the values of leaves that are not arrays. It
    takes a few microseconds; names, axes and specs of the leaves, and the key of a trace, take a hundred.

    Args:
        arguments: a nest of arguments.

    Returns:
        The form, and the arrays in the order of `tf.nest`. None and no arrays if there are leaves other than arrays of
        NumPy and TensorFlow and plain Python values, or containers other than tuples, lists and dictionaries.
    """
    arrays: list[Any] = []

    def form_of_leaf(value: Any) -> Hashable:
        kind = type(value)
        if kind in _PLAIN:
            return kind, value
        if kind is EagerTensor:
            arrays.append(value)
            return kind, value.dtype, value._shape_tuple()
        if kind is np.ndarray or isinstance(value, np.generic):
            arrays.append(value)
            return kind, value.dtype, value.shape
        raise NotPlainError(kind.__name__)

    try:
        return plain_nests.form_of(arguments, form_of_leaf), arrays
    except NotPlainError:
        return None, []
