"""Initial values drawn before AutoDist(...), which differ between workers if the script sets no seed.

Workers compare digests of them, and warn about local computations with values that differ from the chief's.
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import logging
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.ops.resource_variable_ops import BaseResourceVariable  # base class of every eager variable

from autodist.logs.formatting import some_of
from autodist.runtime.eager_watch import is_watched
from autodist.runtime.seeds import is_seeded_by_script

log = logging.getLogger("autodist")


class EarlyValueWarning:
    """Warns if this worker computes locally with initial values that differ from the chief's.

    Args:
        is_shared: True if there are other workers.
        chiefs: the `to_json` of the chief; empty on the chief.
    """

    def __init__(self, is_shared: bool, chiefs: Mapping[str, str]) -> None:
        is_drawn = is_shared and not is_seeded_by_script()
        self._early = EarlyValues.now() if is_drawn else EarlyValues({})
        self._chiefs = chiefs
        self._has_warned = False

    def to_json(self) -> dict[str, str]:
        """Returns the chief's values in the form that the other workers compare with theirs."""
        return self._early.to_json()

    def warn(self, what: str, variables: Sequence[Any]) -> None:
        """Warns, once, if some of the values are not the chief's.

        Args:
            what: the local computation.
            variables: the variables that it uses.
        """
        names = [] if self._has_warned else self._early.differing(self._chiefs, variables)
        if names:
            self._has_warned = True
            log.warning(
                "%s computes on this worker with its own initial values of %s: they were drawn before AutoDist(...) "
                "without a seed, and training uses the chief's values. Build the model after AutoDist(...), or call "
                "keras.utils.set_random_seed before it.",
                what, some_of(names),
            )  # fmt: skip


_ELEMENTS = 1 << 10
"""Number of elements in a digest: a random initializer draws all of a value, so the first ones suffice."""


@dataclass(frozen=True)
class EarlyValues:
    """The floating-point variables of a process, and their values at some moment.

    Attributes:
        held: the variables and digests of their values, by name (numbered if several have one name).
    """

    held: Mapping[str, tuple[weakref.ref[Any], str]]

    @classmethod
    def now(cls) -> Self:
        """Returns the variables that this process has now, in the order of their creation."""
        with context.eager_mode():  # the script may be building a graph
            return cls(_digests())

    def to_json(self) -> dict[str, str]:
        """Returns the digests, by name, as a JSON value."""
        return {name: digest for name, (_, digest) in self.held.items()}

    def differing(self, others: Mapping[str, str], variables: Iterable[Any]) -> list[str]:
        """Returns names of variables that are unchanged since then, and whose value in another process was different.

        Args:
            others: the `to_json` of that process.
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
