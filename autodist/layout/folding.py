"""Constant folding for small tensors: permutations, sizes and axes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import tensorflow as tf

from autodist.graph.ops import filling

_MAX_DEPTH = 8
_MAX_ELEMENTS = 64

Fold = Callable[..., np.ndarray]
Source = Callable[[str], "tf.compat.v1.NodeDef | None"]

_FOLDS: dict[str, Fold] = {
    "Identity": lambda x: x,
    "StopGradient": lambda x: x,
    "Neg": np.negative,
    "Add": np.add,
    "AddV2": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "Range": np.arange,
    "ConcatV2": lambda *parts: np.concatenate(parts[:-1], int(parts[-1])),
    "Reshape": lambda x, shape: np.reshape(x, tuple(shape)),
    "ExpandDims": lambda x, axis: np.expand_dims(x, int(axis)),
    "Fill": lambda dims, value: np.full(tuple(dims), value),
    "Slice": lambda x, begin, size: x[tuple(slice(b, None if n == -1 else b + n) for b, n in zip(begin, size))],
    "InvertPermutation": np.argsort,
    "FloorDiv": np.floor_divide,
    "FloorMod": np.mod,
    "Maximum": np.maximum,
    "Minimum": np.minimum,
    "Less": np.less,
    "LessEqual": np.less_equal,
    "Greater": np.greater,
    "GreaterEqual": np.greater_equal,
    "Equal": np.equal,
    "NotEqual": np.not_equal,
    "Select": np.where,
    "SelectV2": np.where,
    "Prod": lambda x, axes: np.prod(x, axis=tuple(np.atleast_1d(axes))),
}


_OF_SHAPE: dict[str, Callable[[tf.TensorShape], list[int] | int | None]] = {
    "Rank": lambda shape: shape.rank,
    "Shape": lambda shape: shape.as_list() if shape.is_fully_defined() else None,
    "Size": lambda shape: shape.num_elements(),
}


class Constants:
    """Values of a graph's constants, each computed once.

    Args:
        producer: returns the node that produces a tensor.
        shape: returns the static shape of a tensor.
    """

    def __init__(self, producer: Source, shape: Callable[[str], tf.TensorShape]) -> None:
        self._producer, self._shape = producer, shape
        self._values: dict[str, np.ndarray | None] = {}

    def value(self, tensor: str, depth: int = 0) -> np.ndarray | None:
        """Returns the value of a tensor computed from constants only, else None."""
        node = self._producer(tensor)
        if node is None or depth > _MAX_DEPTH:
            return None
        if node.name not in self._values:
            self._values[node.name] = self._compute(node, depth)
        return self._values[node.name]

    def _compute(self, node: tf.compat.v1.NodeDef, depth: int) -> np.ndarray | None:
        if node.op == "Const":
            return tf.make_ndarray(node.attr["value"].tensor)
        if node.op in _OF_SHAPE:
            known = _OF_SHAPE[node.op](self._shape(node.input[0]))
            return None if known is None else np.asarray(known)
        if (number := filling(node.op)) is not None:
            return self._filled(node, number)
        fold = _fold_of(node)
        sources = [name for name in node.input if not name.startswith("^")]
        if fold is None or not sources:
            return None
        values = [self.value(source, depth + 1) for source in sources]
        if any(value is None or value.size > _MAX_ELEMENTS for value in values):
            return None
        return np.asarray(fold(*values))

    def _filled(self, node: tf.compat.v1.NodeDef, number: int) -> np.ndarray | None:
        """Returns zeros or ones in the static shape of the node's input; the input's values are not needed."""
        shape = self._shape(node.input[0])
        if not shape.is_fully_defined() or shape.num_elements() > _MAX_ELEMENTS:
            return None
        return np.full(shape.as_list(), number)


def _fold_of(node: tf.compat.v1.NodeDef) -> Fold | None:
    if node.op == "Pack":
        return lambda *parts: np.stack(parts, node.attr["axis"].i)
    if node.op == "Cast":
        return lambda x: x.astype(tf.dtypes.as_dtype(node.attr["DstT"].type).as_numpy_dtype)
    if node.op == "StridedSlice":
        return _element_of(node)
    return _FOLDS.get(node.op)


def _element_of(node: tf.compat.v1.NodeDef) -> Fold | None:
    """Returns the fold for one element of a vector: x[3]."""
    others = ("begin_mask", "end_mask", "ellipsis_mask", "new_axis_mask")
    if node.attr["shrink_axis_mask"].i != 1 or any(node.attr[mask].i for mask in others):
        return None
    return lambda x, begin, end, strides: x[int(begin[0])]
