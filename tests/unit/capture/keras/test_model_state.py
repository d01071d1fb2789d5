"""Variables that Keras creates in the first step exist before it, with Keras's values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

from autodist.capture.keras.model_state import make_state, reset_variables

X, Y = np.ones((4, 3), "float32"), np.ones((4, 2), "float32")


class _Counted(keras.layers.Dense):
    calls = 0

    def call(self, inputs: Any) -> Any:
        type(self).calls += 1
        return super().call(inputs)


def _one_output(
    optimizer: Callable[[], Any] = lambda: "adam", metrics: Callable[[], list[Any]] = lambda: ["mae", "accuracy"]
) -> keras.Model:
    keras.utils.clear_session(free_memory=False)
    model = keras.Sequential([keras.Input((3,)), _Counted(2)])
    model.compile(optimizer(), "mse", metrics=metrics())
    return model


def _two_outputs() -> keras.Model:
    keras.utils.clear_session(free_memory=False)
    inputs = keras.Input((3,))
    model = keras.Model(inputs, {name: keras.layers.Dense(2, name=name)(inputs) for name in "ab"})
    model.compile("sgd", {"a": "mse", "b": "mae"}, metrics={"a": ["mae"]}, weighted_metrics={"b": ["mse"]})
    return model


CASES: dict[str, tuple[Callable[[], keras.Model], Any]] = {
    "one output": (_one_output, Y),
    "two outputs": (_two_outputs, {"a": Y, "b": Y}),
    "averages": (lambda: _one_output(lambda: keras.optimizers.SGD(use_ema=True, momentum=0.9)), Y),
    "accumulation": (lambda: _one_output(lambda: keras.optimizers.Adam(gradient_accumulation_steps=2)), Y),
    "loss scale": (lambda: _one_output(lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam())), Y),
    "metrics with lazy variables": (lambda: _one_output(metrics=lambda: [keras.metrics.R2Score()]), Y),
}


def _described(model: keras.Model) -> list[tuple[str, tuple[int, ...], str]]:
    variables = [*model.optimizer.variables, *model.metrics_variables]
    return [(v.path, tuple(v.shape), v.dtype) for v in variables]


@pytest.mark.parametrize("make, labels", CASES.values(), ids=CASES)
def test_all_is_named_and_ordered_as_after_a_step(make: Callable[[], keras.Model], labels: Any) -> None:
    stepped = make()
    stepped.train_on_batch(X, labels)
    expected = _described(stepped)
    model = make()
    make_state(model, (X, labels))
    assert model.optimizer.built
    model.train_on_batch(X, labels)
    assert _described(model) == expected


def test_the_step_is_traced_once_then() -> None:
    _Counted.calls = 0
    model = _one_output()
    built = _Counted.calls
    make_state(model, (X, Y))
    model.train_on_batch(X, Y)
    assert _Counted.calls == built + 1


def test_a_step_of_the_scripts_own_makes_its_state_itself() -> None:
    class Own(keras.Model):
        def train_step(self, data: Any) -> Any:
            return super().train_step(data)

    inputs = keras.Input((3,))
    model = Own(inputs, keras.layers.Dense(2)(inputs))
    model.compile("adam", "mse")
    make_state(model, (X, Y))
    assert not model.optimizer.built


def test_metrics_that_do_not_fit_are_refused_in_keras_words() -> None:
    model = _two_outputs()
    model.compile("sgd", "mse", metrics={"c": ["mae"]})
    with pytest.raises(ValueError, match="metrics"):
        make_state(model, (X, {"a": Y, "b": Y}))


class _OwnReset(keras.metrics.MeanAbsoluteError):
    def reset_state(self) -> None:
        """Keeps its state."""


class _OwnResets(keras.Sequential):
    def reset_metrics(self) -> None:
        """Keeps all states."""


@pytest.mark.parametrize("case", ["one output", "two outputs", "metrics with lazy variables"])
def test_keras_resets_all_variables_of_its_metrics(case: str) -> None:
    make, labels = CASES[case]
    model = make()
    model.train_on_batch(X, labels)
    assert {id(v) for v in reset_variables(model)} == {id(v.value) for v in model.metrics_variables}
    for variable in reset_variables(model):
        variable.assign(np.ones(variable.shape))
    model.reset_metrics()
    assert not any(np.any(variable) for variable in reset_variables(model))


def test_resets_by_the_scripts_own_code_are_left_out() -> None:
    model = _one_output(metrics=lambda: ["mae", _OwnReset()])
    model.train_on_batch(X, Y)
    assert len(reset_variables(model)) == len(model.metrics_variables) - 2
    model = _OwnResets([keras.Input((3,)), keras.layers.Dense(2)], name="own")
    model.compile("sgd", "mse")
    model.train_on_batch(X, Y)
    assert reset_variables(model) == []
