"""Values of a checkpoint that this process reads: large ones of a divided model are read when they are needed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from autodist.checkpoint.slices import KeyedVariable, read_into_process
from autodist.runtime.deferred_values import defer, deferred
from autodist.runtime.variables import LARGE

_LENGTHS = {"large": LARGE // 8 + 1, "small": 3}


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    made = str(tmp_path / "saved")
    values = [np.arange(length, dtype="float64") for length in _LENGTHS.values()]
    tf.raw_ops.SaveV2(prefix=made, tensor_names=[*_LENGTHS], shape_and_slices=["", ""], tensors=values)
    return made


@pytest.fixture
def variables() -> dict[str, tf.Variable]:
    return {key: tf.Variable(np.zeros(length)) for key, length in _LENGTHS.items()}


@pytest.mark.parametrize("defers", [False, True])
def test_each_variable_has_its_value(prefix: str, variables: dict[str, tf.Variable], defers: bool) -> None:
    read_into_process(prefix, [KeyedVariable(key, variable) for key, variable in variables.items()], defers)
    assert [deferred(variable) is not None for variable in variables.values()] == [defers, False]
    for variable in variables.values():
        np.testing.assert_array_equal(variable, np.arange(variable.shape[0]))


def test_a_value_that_is_read_replaces_a_deferred_one(prefix: str, variables: dict[str, tf.Variable]) -> None:
    large = variables["large"]
    defer(large, lambda: tf.ones(large.shape, tf.float64))
    read_into_process(prefix, [KeyedVariable("large", large)])
    np.testing.assert_array_equal(large, np.arange(large.shape[0]))
