"""Calls of a step that are alike but for the values of their arrays: what was found out about one holds for all."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np
from tensorflow.python.framework.ops import EagerTensor  # the class of every tensor that has a value

from autodist.tf_compat import plain_nests
from autodist.tf_compat.plain_nests import NotPlainError

_PLAIN = frozenset({type(None), bool, int, float, str, bytes})


def form_of(arguments: Any) -> tuple[Hashable | None, list[Any]]:
    """The form of a call, equal for calls that differ in the values of their arrays alone, and these arrays.

    That is the structure of the arguments, shapes, dtypes, and the values of what is no array. It takes a few
    microseconds, where names, axes and specs of the leaves, and the key of a trace, take a hundred.

    Args:
        arguments: a nest of what is passed.

    Returns:
        None and no arrays where there are others than NumPy's and TensorFlow's arrays and Python's plain values, in
        tuples, lists and dictionaries. The arrays are in the order of `tf.nest`.
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
