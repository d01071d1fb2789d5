"""Digests of initial values at AutoDist(...), which differ between workers if the script sets no seed."""

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
from tensorflow.python.eager import context
from tensorflow.python.ops.resource_variable_ops import BaseResourceVariable  # base class of every eager variable

from autodist.runtime.eager_watch import is_watched

_ELEMENTS = 1 << 10
"""Number of elements in a digest: a random initializer draws all of a value, so the first ones suffice."""


@dataclass(frozen=True)
class EarlyValues:
    """The floating-point variables of a process, and their values at some moment.

    Attributes:
        held: by name (numbered if several have one name), the variable and a digest of its value.
    """

    held: Mapping[str, tuple[weakref.ref[Any], str]]

    @classmethod
    def now(cls) -> Self:
        """Returns the variables that this process has now, in the order of their creation."""
        with context.eager_mode():  # the script may be building a graph
            return cls(_digests())

    def told(self) -> dict[str, str]:
        """Returns the digests, by name, as a JSON value."""
        return {name: digest for name, (_, digest) in self.held.items()}

    def differing(self, others: Mapping[str, str], variables: Iterable[Any]) -> list[str]:
        """Returns names of variables that are unchanged since then, and whose value in another process was different.

        Args:
            others: the `told` of that process.
            variables: the variables to check.
        """
        ids = {id(variable) for variable in variables}
        names = []
        for name, (known, digest) in self.held.items():
            variable = known()
            if variable is None or id(variable) not in ids or others.get(name, digest) == digest:
                continue
            with context.eager_mode():
                if _digest(variable) == digest:
                    names.append(variable.name.removesuffix(":0"))
        return names


def _digests() -> dict[str, tuple[weakref.ref[Any], str]]:
    variables = [o for o in gc.get_objects() if issubclass(type(o), BaseResourceVariable) and _is_value(o)]
    times: Counter[str] = Counter()
    held = {}
    for variable in sorted(variables, key=_number):
        times[variable.name] += 1
        held[f"{variable.name}#{times[variable.name]}"] = (weakref.ref(variable), _digest(variable))
    return held


def _is_value(variable: Any) -> bool:
    """Returns False for variables of a run or a graph, variables of other dtypes, and uninitialized variables.

    A run of this process reads its variables from where they are kept, which may be another machine.
    """
    handle = variable.handle
    return (
        not is_watched(variable)
        and isinstance(handle, tf.Tensor)
        and hasattr(handle, "numpy")
        and variable.dtype.is_floating
        and bool(tf.raw_ops.VarIsInitializedOp(resource=handle))
    )


def _number(variable: Any) -> int:
    """Returns the creation number of a variable."""
    digits = [*itertools.takewhile(str.isdigit, reversed(variable._unique_id))]
    return int("".join(reversed(digits)) or 0)


def _digest(variable: Any) -> str:
    value = tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype.base_dtype)
    first = np.asarray(tf.reshape(value, [-1])[:_ELEMENTS])
    return hashlib.blake2b(first.tobytes(), digest_size=8).hexdigest()
