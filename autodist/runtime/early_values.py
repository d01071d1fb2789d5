"""Early values: what variables held when AutoDist(...) was called, which without a seed is each worker's own."""

from __future__ import annotations

import gc
import hashlib
import itertools
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import tensorflow as tf
from tensorflow.python.ops.resource_variable_ops import BaseResourceVariable  # of which every eager variable is one

_ELEMENTS = 1 << 10
"""Elements of a value by which it is told apart: where one is drawn, they all are."""


@dataclass(frozen=True)
class EarlyValues:
    """The floating-point variables of a process, and their values at some moment.

    Attributes:
        held: by name, counted where several have one name, the variable and a digest of its value.
    """

    held: Mapping[str, tuple[weakref.ref[Any], str]]

    @classmethod
    def now(cls) -> Self:
        """The variables that this process has by now, in the order in which they were made."""
        found = [o for o in gc.get_objects() if issubclass(type(o), BaseResourceVariable) and _is_value(o)]
        times: Counter[str] = Counter()
        held = {}
        for variable in sorted(found, key=_number):
            times[variable.name] += 1
            held[f"{variable.name}#{times[variable.name]}"] = (weakref.ref(variable), _digest(variable))
        return cls(held)

    def told(self) -> dict[str, str]:
        """The digests, by name, as JSON has them."""
        return {name: digest for name, (_, digest) in self.held.items()}

    def differing(self, others: Mapping[str, str], variables: Iterable[Any]) -> list[str]:
        """Names of variables that hold what they held then, where another process held something else.

        Args:
            others: what that process has `told`.
            variables: among which to look.
        """
        asked = {id(variable) for variable in variables}
        found = []
        for name, (known, digest) in self.held.items():
            variable = known()
            if variable is None or id(variable) not in asked:
                continue
            if others.get(name, digest) != digest and _digest(variable) == digest:
                found.append(variable.name.removesuffix(":0"))
        return found


def _is_value(variable: Any) -> bool:
    """Returns False for what a graph has, for what is no number drawn, and for what has no value yet."""
    handle = variable.handle
    return (
        isinstance(handle, tf.Tensor)
        and hasattr(handle, "numpy")
        and variable.dtype.is_floating
        and bool(tf.raw_ops.VarIsInitializedOp(resource=handle))
    )


def _number(variable: Any) -> int:
    """The number of a variable; TensorFlow counts what it makes."""
    digits = [*itertools.takewhile(str.isdigit, reversed(variable._unique_id))]
    return int("".join(reversed(digits)) or 0)


def _digest(variable: Any) -> str:
    value = tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype.base_dtype)
    first = np.asarray(tf.reshape(value, [-1])[:_ELEMENTS])
    return hashlib.blake2b(first.tobytes(), digest_size=8).hexdigest()
