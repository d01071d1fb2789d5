"""Large weights that Keras loads stay in their file if a strategy divides variables; the values do not change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from autodist.capture.keras.distribution.run_settings import RunSettings, set_run
from autodist.errors import CheckpointError
from autodist.runtime.deferred_values import deferred
from tests.versions import since_keras

pytestmark = [pytest.mark.usefixtures("divided_run"), since_keras("3.11", "a store that reads weights as arrays")]

WIDTH = 600


def made(dtype: str = "float32") -> keras.Model:
    layers = [keras.layers.Embedding(WIDTH, WIDTH, dtype=dtype), keras.layers.Dense(WIDTH, dtype=dtype)]
    model = keras.Sequential([keras.Input((3,), dtype="int32"), *layers, keras.layers.Dense(2, dtype=dtype)])
    model.compile("adam", "mse")
    model.optimizer.build(model.trainable_variables)
    return model


def values(model: keras.Model) -> list[np.ndarray]:
    return [np.asarray(variable.value) for variable in (*model.variables, *model.optimizer.variables)]


def count_deferred(model: keras.Model) -> int:
    return sum(deferred(one.value) is not None for one in (*model.variables, *model.optimizer.variables))


def assert_equal(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for one, value in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, value)


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, list[np.ndarray]]:
    """Returns a file of weights and its values."""
    return save(made(), tmp_path / "saved.weights.h5")


def save(model: keras.Model, path: Path) -> tuple[Path, list[np.ndarray]]:
    for variable in (*model.variables, *model.optimizer.variables):
        variable.assign(keras.random.normal(variable.shape) if "float" in variable.dtype else variable)
    model.save_weights(path)
    return path, values(model)


@pytest.mark.parametrize(("dtype", "shards"), [("float32", False), ("float32", True), ("bfloat16", False)])
def test_two_kernels_and_their_slots_are_read_when_they_are_needed(dtype: str, shards: bool, tmp_path: Path) -> None:
    model = made(dtype)
    path, expected = save(model, tmp_path / "saved.weights.h5")
    if shards:
        model.save_weights(path := tmp_path / "saved.weights.json", max_shard_size=0.003)
    loaded = made(dtype)
    loaded.load_weights(path)
    assert count_deferred(loaded) == (6 if dtype == "float32" else 0)  # in bfloat16 they are small
    assert_equal(values(loaded), expected)
    assert count_deferred(loaded) == 0


def test_a_value_of_the_script_takes_the_place_of_one_in_a_file(saved: Any) -> None:
    path, expected = saved
    model = made()
    model.load_weights(path)
    model.layers[0].set_weights([np.full((WIDTH, WIDTH), 0.5)])
    model.layers[1].kernel.assign_add(keras.ops.ones((WIDTH, WIDTH)))
    expected[0], expected[1] = np.full_like(expected[0], 0.5), expected[1] + 1
    assert_equal(values(model), expected)


def test_the_file_may_be_removed_or_replaced(saved: Any, tmp_path: Path) -> None:
    path, expected = saved
    first, second = made(), made()
    first.load_weights(path)
    path.rename(tmp_path / "other.weights.h5")
    _, of_other = save(made(), path)
    second.load_weights(path)
    path.unlink()
    assert_equal(values(second), of_other)
    assert_equal(values(first), expected)


def test_keras_may_write_over_the_file(saved: Any) -> None:
    path, expected = saved
    model = made()
    model.load_weights(path)
    model.save_weights(path)
    assert_equal(values(model), expected)
    model.load_weights(path)
    assert_equal(values(model), expected)


def test_values_that_another_program_has_written_over_are_an_error(saved: Any) -> None:
    path, _ = saved
    model = made()
    model.load_weights(path)
    with path.open("ab") as opened:
        opened.write(b"more")
    with pytest.raises(CheckpointError, match=r"saved.weights.h5 has been written since its weights were loaded"):
        model.layers[0].get_weights()


@pytest.mark.parametrize("case", ["whole variables", "archive", "graph"])
def test_other_values_are_held(case: str, saved: Any, tmp_path: Path) -> None:
    path, expected = saved
    if case == "whole variables":
        set_run(RunSettings(("cpu:0",)))
    if case == "archive":
        source = made()
        source.load_weights(path)
        source.save(path := tmp_path / "saved.keras")
    model = made()
    if case == "graph":
        tf.function(lambda: model.layers[0].load_own_variables({"0": expected[0]}))()
    else:
        model.load_weights(path)
    first = model.layers[0].variables[0].value  # the initial values of other layers may be deferred
    assert deferred(first) is None if case == "graph" else count_deferred(model) == 0
    assert_equal(values(model)[:1], expected[:1])


def test_a_value_of_another_shape_is_an_error_of_keras(saved: Any) -> None:
    other = keras.Sequential([keras.Input((3,), dtype="int32"), keras.layers.Embedding(WIDTH, WIDTH + 1)])
    with pytest.raises(ValueError, match="could not be loaded"):
        other.load_weights(saved[0])
