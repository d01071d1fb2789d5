"""Adopted models are saved, loaded and cloned as without AutoDist, and their steps follow the options of `compile`."""

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from autodist.capture.keras import models as own_module
from autodist.capture.keras.models import KerasModels


class _Steps:
    """Makes Keras's own steps, and counts the models."""

    def __init__(self) -> None:
        self.made = 0

    def __call__(self, train_step: Callable[..., Any], *_: Any) -> Callable[..., Any]:
        self.made += 1
        train_step.traces = 1  # type: ignore[attr-defined]
        return train_step


def _fit(model: keras.Model) -> None:
    model.fit(np.ones((4, 3), "float32"), np.ones((4, 2), "float32"), batch_size=2, verbose=0)


@pytest.fixture
def trained() -> keras.Model:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile(optimizer=keras.optimizers.Adam(), loss="mse", metrics=["mae"])
    _fit(model)
    return model


def test_a_model_that_is_loaded_is_compiled_and_goes_on_where_it_was(trained: keras.Model, tmp_path: Path) -> None:
    trained.save(tmp_path / "model.keras")
    steps = _Steps()
    with KerasModels(steps).adopting():
        loaded = keras.models.load_model(tmp_path / "model.keras")
        assert loaded.compiled
        for before, after in zip(trained.optimizer.variables, loaded.optimizer.variables, strict=True):
            np.testing.assert_array_equal(before, after)
        _fit(loaded)
    assert steps.made == 1
    assert int(loaded.optimizer.iterations) == 4


def test_after_the_scope_keras_is_as_it_was() -> None:
    def methods() -> list[Any]:
        return [vars(base).get(name) for base in keras.Model.__mro__ for name in ("compile", "make_train_function")]

    before = methods()
    with KerasModels(_Steps()).adopting():
        assert methods() != before
    assert methods() == before


def asked_of(**settings):
    """Returns True if XLA compiles the step of a model compiled with these settings."""
    asked = []
    models = KerasModels(lambda step, jit_compile, batch_axis: asked.append(jit_compile))
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    with models.adopting():
        model.compile("sgd", "mse", **settings)
    model.make_train_function()
    return asked


@pytest.mark.parametrize("jit_compile", [True, False])
def test_a_model_that_asks_for_xla_gets_a_step_that_does(jit_compile):
    assert asked_of(jit_compile=jit_compile) == [jit_compile]


def test_decisions_of_keras_stay(monkeypatch):
    monkeypatch.setattr(keras.Model, "_resolve_auto_jit_compile", lambda model: True)
    assert asked_of() == [True]
    monkeypatch.setattr(keras.Model, "_resolve_auto_jit_compile", lambda model: False)
    assert asked_of() == [False]


class _Fault(keras.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        raise ValueError("of the script")


def _files_of_error(model: keras.Model) -> list[str]:
    with pytest.raises(ValueError, match="of the script") as raised:
        model.fit(np.ones((4, 3), "float32"), np.ones((4, 2), "float32"), verbose=0, callbacks=[_Fault()])
    return [entry.filename for entry in traceback.extract_tb(raised.value.__traceback__)]


@pytest.mark.parametrize("is_adopted", [True, False])
def test_an_error_in_fit_shows_the_scripts_lines_and_none_of_ours(trained: keras.Model, is_adopted: bool) -> None:
    ours = str(Path(own_module.__file__).parents[2])
    models = KerasModels(_Steps())
    with models.adopting():
        if is_adopted:
            models.adopt(trained)
        shown = _files_of_error(trained)
        assert shown[0] == shown[-1] == __file__
        assert not [name for name in shown if name.startswith(ours)]
        keras.config.disable_traceback_filtering()
        try:
            assert [name for name in _files_of_error(trained) if name.startswith(ours)]
        finally:
            keras.config.enable_traceback_filtering()
