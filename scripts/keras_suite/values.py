"""Recorded results of training in a test, to compare two runs of the test."""

from __future__ import annotations

import functools
import hashlib
import math
import pathlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
from numpy.typing import NDArray

METHODS = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")
TOLERANCE = 1e-5
"""Tolerance for float32, relative to the largest number of an array, or to 1."""

Values = Mapping[str, NDArray[Any]]


def values_file(test: str) -> str:
    """Returns the name of the file for the values of a test."""
    return hashlib.sha256(test.encode()).hexdigest() + ".npz"


@contextmanager
def recording(path: pathlib.Path) -> Iterator[None]:
    """Writes the results of the models' METHODS, and the weights after each, in order; nothing if none is called."""
    from keras.src.backend.tensorflow.trainer import TensorFlowTrainer

    found: dict[str, NDArray[Any]] = {}
    under_way: list[str] = []

    def recorded(name: str) -> Callable[..., Any]:
        plain = vars(TensorFlowTrainer).get(name) or getattr(TensorFlowTrainer, name)

        @functools.wraps(plain)
        def call(model: Any, *args: Any, **kwargs: Any) -> Any:
            under_way.append(name)
            try:
                returned = plain(model, *args, **kwargs)
            finally:
                under_way.pop()
            if not under_way:  # called by the script itself, not by `fit`
                _add(found, f"{len(found):04} {name} ", getattr(returned, "history", returned))
                _add(found, f"{len(found):04} weights ", getattr(model, "weights", []))
            return returned

        return call

    with ExitStack() as stack:
        for name in METHODS:
            stack.enter_context(mock.patch.object(TensorFlowTrainer, name, recorded(name)))
        yield
    if found:
        np.savez(path, **found)  # type: ignore[arg-type]


def _add(found: dict[str, NDArray[Any]], prefix: str, values: Any) -> None:
    from keras import tree

    for number, leaf in enumerate(tree.flatten(values)):
        array = np.asarray(leaf)
        if array.dtype.kind in "fiubc":
            found[f"{prefix}{number}"] = array


@dataclass(frozen=True)
class Difference:
    """The largest difference between two runs of a test, relative to the largest number of its array, or to 1."""

    largest: float
    where: str

    @property
    def is_tolerable(self) -> bool:
        """True if the difference is within TOLERANCE."""
        return self.largest <= TOLERANCE

    def __str__(self) -> str:
        return self.where if math.isinf(self.largest) else f"{self.where}: {self.largest:.2e}"


def difference(one: Values, other: Values) -> Difference | None:
    """Returns the largest difference of two runs of a test; None if neither has recorded anything."""
    if list(one) != list(other):
        return Difference(math.inf, f"one recorded {len(one)} arrays, the other {len(other)}")
    found = (_of_arrays(name, a, other[name]) for name, a in one.items())
    return max(found, key=lambda each: each.largest, default=None)


def _of_arrays(name: str, a: NDArray[Any], b: NDArray[Any]) -> Difference:
    if a.shape != b.shape:
        return Difference(math.inf, f"{name}: shapes {a.shape} and {b.shape}")
    dtype = np.result_type(a, b, np.float64)
    a, b = a.astype(dtype), b.astype(dtype)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    if not np.isfinite(a[~same]).all() or not np.isfinite(b[~same]).all():
        return Difference(math.inf, f"{name}: finite in one run alone")
    return Difference(float(np.abs(a[~same] - b[~same]).max(initial=0.0)) / max(1.0, _largest(b)), name)


def _largest(array: NDArray[Any]) -> float:
    finite = np.abs(array[np.isfinite(array)])
    return float(finite.max(initial=0.0))


def read_values(path: pathlib.Path) -> Values:
    """Returns the values that `recording` has written; empty if there are none."""
    if not path.exists():
        return {}
    with np.load(path) as stored:
        return dict(stored)
