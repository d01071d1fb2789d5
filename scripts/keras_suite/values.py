"""What training gave in a test, kept so that two runs of the test can be compared."""

from __future__ import annotations

import functools
import hashlib
import pathlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
from numpy.typing import NDArray

METHODS = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")
TOLERANCE = 1e-5
"""Of float32, relative to the largest number of an array, or to 1."""

Values = Mapping[str, NDArray[Any]]


def values_file(test: str) -> str:
    """The name of the file that takes the values of a test."""
    return hashlib.sha256(test.encode()).hexdigest() + ".npz"


@contextmanager
def recording(path: pathlib.Path) -> Iterator[None]:
    """Writes what the models' METHODS return, and the weights that they leave, in order; nothing if none is called."""
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
            if not under_way:  # what the script itself has called, not what `fit` calls
                _add(found, f"{len(found):04} {name} ", getattr(returned, "history", returned))
                _add(found, f"{len(found):04} weights ", getattr(model, "weights", []))
            return returned

        return call

    with ExitStack() as stack:
        for name in METHODS:
            stack.enter_context(mock.patch.object(TensorFlowTrainer, name, recorded(name)))
        yield
    if found:
        np.savez(path, **found)


def _add(found: dict[str, NDArray[Any]], prefix: str, values: Any) -> None:
    from keras import tree

    for number, leaf in enumerate(tree.flatten(values)):
        array = np.asarray(leaf)
        if array.dtype.kind in "fiubc":
            found[f"{prefix}{number}"] = array


def difference(one: Values, other: Values) -> str:
    """Where two runs of a test differ by more than TOLERANCE; "" if they do not."""
    if list(one) != list(other):
        return f"one recorded {len(one)} arrays, the other {len(other)}"
    for name, a in one.items():
        b = other[name]
        if a.shape != b.shape:
            return f"{name}: shapes {a.shape} and {b.shape}"
        if a.size and not np.allclose(a, b, rtol=0, atol=TOLERANCE * max(1.0, _largest(b)), equal_nan=True):
            return f"{name}: {np.abs(a.astype(float) - b.astype(float)).max():.2e} of {_largest(b):.2e}"
    return ""


def _largest(array: NDArray[Any]) -> float:
    finite = np.abs(array[np.isfinite(array)].astype(np.float64))
    return float(finite.max(initial=0.0))


def read_values(path: pathlib.Path) -> Values:
    """What `recording` has written; nothing if it has written nothing."""
    if not path.exists():
        return {}
    with np.load(path) as stored:
        return dict(stored)
