"""How far values of two runs lie apart."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray


def relative_difference(expected: NDArray[Any], found: NDArray[Any]) -> float:
    """The largest |expected - found| divided by the largest |expected|; infinite if a value of either is not finite.

    >>> relative_difference(np.array([1.0, 4.0]), np.array([1.0, 5.0]))
    0.25
    """
    a, b = expected.astype(np.float64), found.astype(np.float64)
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return math.inf
    difference, size = np.abs(a - b).max(initial=0.0), np.abs(a).max(initial=0.0)
    if difference == 0:
        return 0.0
    return float(difference / size) if size else math.inf
