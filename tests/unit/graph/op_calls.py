"""Calls of ops, and their operands of drawn shapes."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import tensorflow as tf
from hypothesis import strategies as st
from tensorflow.python.framework import op_def_registry

RENAMED = {"reduction_indices": "axis", "dim": "axis", "split_dim": "axis", "t": "x", "e": "y"}
"""Names of operands that differ in Python."""


@dataclass
class Call:
    """One op with its operands, in the order of its definition, and its attributes."""

    op: str
    operands: Sequence[object]
    attributes: dict[str, object] = field(default_factory=dict)

    def run(self, operands: Sequence[object] | None = None) -> list[np.ndarray]:
        made = self.made([tf.constant(operand) for operand in operands or self.operands])
        return [np.asarray(result) for result in made]

    def made(self, operands: list[object]) -> list[object]:
        taken, function = {}, getattr(tf.raw_ops, self.op)
        parameters = inspect.signature(function).parameters
        arguments = op_def_registry.get(self.op).input_arg
        for argument in arguments:
            count = len(self.operands) - len(arguments) + 1
            is_list = bool(argument.number_attr or argument.type_list_attr)
            name = argument.name if argument.name in parameters else RENAMED[argument.name]
            taken[name] = [operands.pop(0) for _ in range(count)] if is_list else operands.pop(0)
        return tf.nest.flatten(function(**taken, **self.attributes))


class Draw:
    """Draws small shapes and the elements of tensors."""

    def __init__(self, data: st.DataObject) -> None:
        self._data = data
        self._random = np.random.default_rng(data.draw(st.integers(0, 99)))

    def size(self, least: int = 2) -> int:
        return self._data.draw(st.integers(least, 5))

    def sizes(self, least: int = 0, most: int = 2) -> tuple[int, ...]:
        """Returns the lengths of leading axes."""
        return tuple(self.size() for _ in range(self._data.draw(st.integers(least, most))))

    def choose(self, *values: object) -> object:
        return self._data.draw(st.sampled_from(values))

    def floats(self, *shape: int, dtype: str = "float64") -> np.ndarray:
        return self._random.uniform(0.1, 0.9, shape).astype(dtype)

    def integers(self, *shape: int, below: int = 3, dtype: str = "int32") -> np.ndarray:
        return self._random.integers(0, below, shape).astype(dtype)

    def parts(self, length: int) -> list[int]:
        first = self._data.draw(st.integers(1, length - 1))
        return [first, length - first]
