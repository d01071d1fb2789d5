#!/usr/bin/env python3
"""Prints the difference between the weights of two training runs.

    python scripts/compare_weights.py alone.npz many.npz

Each file holds one array for each variable, under its name (`numpy.savez`). The relative difference of a variable is
the largest |a - b| divided by the largest |a|, where a is its value in the first file and b in the second; 0 if both
are zero everywhere. The largest difference over all variables is printed, with the name of its variable.

The exit status is 1 if that difference exceeds --at-most, a value is not finite, or the files hold different variables.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from autodist.verify.records import relative_difference

Weights = Mapping[str, NDArray[np.generic]]


class DifferentVariablesError(ValueError):
    """The two files do not hold the same variables."""


def largest_difference(first: Weights, second: Weights) -> tuple[str, float]:
    """Returns the variable that differs most between two runs, and its relative difference.

    Raises:
        DifferentVariablesError: the names or shapes differ, or there are none.
    """
    for name in sorted({*first, *second}):
        if name not in first or name not in second:
            raise DifferentVariablesError(f"{name} is only in the {'second' if name not in first else 'first'} file")
        if first[name].shape != second[name].shape:
            raise DifferentVariablesError(f"{name} has the shapes {first[name].shape} and {second[name].shape}")
    if not first:
        raise DifferentVariablesError("the files hold no variables")
    differences = {name: relative_difference(first[name], second[name]) for name in first}
    name = max(differences, key=differences.__getitem__)
    return name, differences[name]


def main() -> None:
    parser = argparse.ArgumentParser(description="Print the difference between the weights of two training runs.")
    parser.add_argument("first", help="an .npz file, the reference")
    parser.add_argument("second", help="an .npz file")
    parser.add_argument("--at-most", type=float, default=math.inf, help="the largest difference that is accepted")
    arguments = parser.parse_args()
    with np.load(arguments.first) as first, np.load(arguments.second) as second:
        try:
            name, difference = largest_difference(dict(first), dict(second))
        except DifferentVariablesError as error:
            sys.exit(f"error: {error}; pass the weights of two runs of the same script")
    print(f"largest relative difference of any weight: {difference:.1e} ({name}, of {len(first.files)} variables)")
    if not difference <= arguments.at_most:
        sys.exit(f"error: the difference exceeds {arguments.at_most:g}: the two runs trained different weights")


if __name__ == "__main__":
    main()
