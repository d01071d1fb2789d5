"""Large variables of Keras are made without their values if a strategy divides variables; the values do not change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from autodist.capture.keras.distribution import run_settings
from autodist.capture.keras.distribution.run_settings import RunSettings, set_run
from autodist.runtime.deferred_values import defer, deferred
from autodist.strategies import FSDP, PS, AllReduce, Mesh, Pipeline, divides_variables

pytestmark = pytest.mark.usefixtures("divided_run")

LARGE = (1024, 513)


def make(initializer: Any, shape: tuple[int, ...] = LARGE, dtype: str = "float32") -> keras.Variable:
    return keras.Variable(initializer, shape=shape, dtype=dtype)


def is_deferred(variable: keras.Variable) -> bool:
    return deferred(variable.value) is not None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "initializer",
    [
        "zeros",
        keras.initializers.Constant(3.0),
        keras.initializers.GlorotUniform(seed=3),
        keras.initializers.TruncatedNormal(seed=4),
        keras.initializers.HeNormal(),
        keras.initializers.Identity(),
        pytest.param(keras.initializers.Orthogonal(seed=5), id="Orthogonal"),
    ],
    ids=lambda one: one if isinstance(one, str) else type(one).__name__,
)
def test_values_are_those_of_one_device(initializer: Any, dtype: str) -> None:
    if dtype == "bfloat16" and isinstance(initializer, keras.initializers.Orthogonal):
        pytest.skip("Keras has no such value")
    made = make(initializer, dtype=dtype)
    assert is_deferred(made)
    expected = keras.initializers.get(initializer)(LARGE, dtype=dtype)
    np.testing.assert_array_equal(np.asarray(made.value), np.asarray(expected))


def test_a_model_has_the_weights_of_one_device() -> None:
    def weights() -> list[np.ndarray]:
        keras.utils.set_random_seed(7)
        layers = [keras.layers.Dense(600), keras.layers.Dense(600, "relu"), keras.layers.Dense(2)]
        model = keras.Sequential([keras.Input((600,)), *layers])
        model.compile("adam", "mse")
        model.optimizer.build(model.trainable_variables)
        deferring = [is_deferred(variable) for variable in (*model.variables, *model.optimizer.variables)]
        assert sum(deferring) == (6 if run_settings.current_run().divides_variables else 0)
        return [*model.get_weights(), *map(np.asarray, model.optimizer.variables)]

    later = weights()
    set_run(RunSettings(("cpu:0",)))
    for one, other in zip(later, weights(), strict=True):
        np.testing.assert_array_equal(one, other)


def drawn(shape: tuple[int, ...], dtype: str) -> tf.Tensor:
    return tf.random.normal(shape, dtype=dtype)


class Own(keras.initializers.Initializer):
    def __call__(self, shape: tuple[int, ...], dtype: str | None = None) -> Any:
        return keras.ops.full(shape, np.random.uniform(), dtype)


@pytest.mark.parametrize(
    "initializer",
    [
        lambda: drawn,
        Own,
        lambda: keras.initializers.RandomNormal(seed=keras.random.SeedGenerator(1)),
        lambda: np.ones(LARGE, "float32"),
    ],
    ids=["function", "own", "generator", "array"],
)
def test_values_that_may_be_another_next_time_are_made_at_once(initializer: Callable[[], Any]) -> None:
    assert not is_deferred(keras.Variable(initializer(), shape=LARGE, dtype="float32"))


@pytest.mark.parametrize("function", [tf.function, lambda step: step], ids=["function", "eager"])
def test_slots_are_deferred_where_the_step_makes_them(
    function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []

    def noting(variable: tf.Variable, compute: Callable[[], tf.Tensor]) -> None:
        names.append(variable.name)
        defer(variable, compute)

    monkeypatch.setattr("autodist.runs.keras_values.defer", noting)

    def trained() -> tuple[keras.Optimizer, np.ndarray]:
        kernel = keras.Variable(keras.initializers.HeNormal(seed=1), shape=LARGE, dtype="float32", name="kernel")
        optimizer = keras.optimizers.Adam(0.1, name="adam")

        @function
        def step(x: tf.Tensor) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(x @ kernel)
            optimizer.apply(tape.gradient(loss, [kernel]), [kernel])

        step(tf.ones([2, LARGE[0]]))
        assert not is_deferred(kernel)
        return optimizer, np.asarray(kernel)

    _, value = trained()
    set_run(RunSettings(("cpu:0",)))
    plain, expected = trained()
    np.testing.assert_array_equal(value, expected)
    assert names == ["kernel:0", *(variable.value.name for variable in plain.variables if variable.ndim)]


def test_variables_of_a_graph_have_initializers() -> None:
    with tf.Graph().as_default():
        assert not is_deferred(make("ones"))


def test_small_values_are_made_at_once() -> None:
    assert not is_deferred(make("ones", (10, 10)))


def test_other_strategies_make_values_at_once() -> None:
    set_run(RunSettings(("cpu:0",)))
    assert not is_deferred(make("ones"))


def test_the_strategies_that_divide_variables() -> None:
    mesh = Mesh(mesh={"model": 2})
    assert [*map(divides_variables, (FSDP(), mesh, Pipeline(), PS(), AllReduce()))] == [True, True, True, False, False]
