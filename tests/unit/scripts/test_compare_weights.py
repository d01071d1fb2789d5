"""scripts/compare_weights.py: its measurement, and its errors."""

from __future__ import annotations

import math
import pathlib
import runpy
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

SCRIPT = pathlib.Path(__file__).resolve().parents[3] / "scripts" / "compare_weights.py"
COMPARE: dict[str, Any] = runpy.run_path(str(SCRIPT))
relative_difference = COMPARE["relative_difference"]
largest_difference = COMPARE["largest_difference"]
DifferentVariablesError: type[ValueError] = COMPARE["DifferentVariablesError"]


def run(directory: pathlib.Path, first: dict[str, Any], second: dict[str, Any], *options: str) -> tuple[int, str, str]:
    np.savez(directory / "first.npz", **first)
    np.savez(directory / "second.npz", **second)
    command = [sys.executable, str(SCRIPT), *options, "first.npz", "second.npz"]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False, timeout=60)
    return done.returncode, done.stdout, done.stderr


def test_equal_values_differ_by_nothing() -> None:
    assert relative_difference(np.float32([1, -2]), np.float32([1, -2])) == 0
    assert relative_difference(np.zeros(3), np.zeros(3)) == 0
    assert relative_difference(np.zeros((0, 4)), np.zeros((0, 4))) == 0


def test_the_difference_is_relative_to_the_largest_value_of_the_first() -> None:
    assert relative_difference(np.array([0.0, -4.0, 1.0]), np.array([0.5, -4.0, 1.25])) == 0.125
    assert relative_difference(np.array([8.0]), np.array([4.0])) == 0.5


def test_small_differences_of_float32_and_of_unsigned_values_are_not_lost() -> None:
    assert relative_difference(np.float32([1]), np.float32([1 + 2**-23])) == 2**-23
    assert relative_difference(np.uint8([10]), np.uint8([12])) == 0.2


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_differs_without_bound(value: float) -> None:
    assert relative_difference(np.array([value]), np.array([value])) == math.inf
    assert relative_difference(np.array([1.0]), np.array([value])) == math.inf


def test_something_beside_zeros_differs_without_bound() -> None:
    assert relative_difference(np.zeros(2), np.array([0.0, 1e-9])) == math.inf


def test_the_variable_that_differs_most_is_named() -> None:
    first = {"a": np.ones(2), "b": np.ones(2), "c": np.ones(2)}
    second = {"a": np.ones(2), "b": np.array([1, 1.5]), "c": np.array([1.25, 1])}
    assert largest_difference(first, second) == ("b", 0.5)


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ({"a": np.ones(1)}, {}, "a is only in the first file"),
        ({}, {"a": np.ones(1)}, "a is only in the second file"),
        ({"a": np.ones(1)}, {"a": np.ones(2)}, r"a has the shapes \(1,\) and \(2,\)"),
        ({}, {}, "the files hold no variables"),
    ],
)
def test_other_variables_are_an_error(first: dict[str, Any], second: dict[str, Any], message: str) -> None:
    with pytest.raises(DifferentVariablesError, match=message):
        largest_difference(first, second)


def test_the_command_prints_the_largest_difference(tmp_path: pathlib.Path) -> None:
    code, output, errors = run(tmp_path, {"w/kernel": [1.0, 2.0]}, {"w/kernel": [1.0, 2.0625]})
    assert (code, errors) == (0, "")
    assert output == "largest relative difference of any weight: 3.1e-02 (w/kernel, of 1 variables)\n"


def test_the_command_fails_above_the_bound_and_not_at_it(tmp_path: pathlib.Path) -> None:
    first, second = {"w": [2.0]}, {"w": [2.25]}
    assert run(tmp_path, first, second, "--at-most", "0.125")[0] == 0
    code, output, errors = run(tmp_path, first, second, "--at-most", "0.1")
    assert code == 1
    assert "1.2e-01" in output
    assert "exceeds 0.1" in errors


def test_the_command_fails_where_variables_are_missing(tmp_path: pathlib.Path) -> None:
    code, output, errors = run(tmp_path, {"a": [1.0]}, {"b": [1.0]})
    assert (code, output) == (1, "")
    assert errors.startswith("error: a is only in the first file; ")
