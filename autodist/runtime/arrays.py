"""Arrays on their way between workers."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np

REDUCTIONS = ("mean", "sum")


def pack_array(array: np.ndarray) -> bytes:
    """The array in NumPy's own format."""
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return file.getvalue()


def unpack_array(content: bytes) -> np.ndarray:
    """The array that `pack_array` packed."""
    return np.load(io.BytesIO(content), allow_pickle=False)


def combine(arrays: Sequence[np.ndarray], how: str) -> np.ndarray:
    """The mean or sum of arrays of one shape, in their order.

    Raises:
        ValueError: if `how` is neither, or shapes differ.
    """
    if how not in REDUCTIONS:
        raise ValueError(f"{how!r} is not a reduction; it may be {' or '.join(map(repr, REDUCTIONS))}.")
    shapes = {a.shape for a in arrays}
    if len(shapes) > 1:
        raise ValueError(f"the workers have values of different shapes ({', '.join(map(str, sorted(shapes)))}).")
    total = np.sum(np.stack(arrays), axis=0)
    return total / len(arrays) if how == "mean" else total
