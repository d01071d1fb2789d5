"""Notes on variables that are made under a distribution or with a layout, and the refusals that they lead to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import pytest
import tensorflow as tf
from keras.distribution import DataParallel, DeviceMesh, LayoutMap, ModelParallel, TensorLayout

from autodist.capture.keras.distribution.variables import (
    KerasVariable,
    keras_variable,
    made_under,
    require_no_layout,
    require_unsharded,
)
from autodist.errors import StrategyError


def mesh() -> DeviceMesh:
    return DeviceMesh((1, 2), ["batch", "model"])


@pytest.mark.feature("session", "step: `keras.distribution.ModelParallel`", refused="StrategyError")
def test_a_variable_made_under_model_parallel_is_refused_in_a_session() -> None:
    distribution = ModelParallel(layout_map=LayoutMap(mesh()))
    with distribution.scope():
        layer = keras.layers.Dense(4, name="dense")
        layer.build((None, 6))
    assert made_under(layer.kernel.value) is distribution
    with pytest.raises(StrategyError, match=r"The variable dense/kernel was made while keras.distribution's ModelPar"):
        require_unsharded([weight.value for weight in layer.weights])


def test_variables_of_other_models_and_of_data_parallel_pass() -> None:
    with DataParallel().scope():
        variables = [keras.Variable([1.0, 2.0]), keras.Variable([1.0], layout=TensorLayout((None,), mesh()))]
    assert [made_under(variable.value) for variable in variables] == [None, None]
    require_unsharded(variable.value for variable in variables)


@pytest.mark.parametrize("require", [require_unsharded, require_no_layout])
def test_a_layout_of_a_variable_is_refused_without_a_distribution(require: Callable[[list[Any]], None]) -> None:
    variable = keras.Variable([1.0, 2.0], layout=TensorLayout(("model",), mesh()), name="own")
    with pytest.raises(StrategyError, match=r"The variable own is made with a layout, keras.Variable\(…, layout=…\)"):
        require([variable.value])


def test_a_variable_is_described_by_its_path_in_keras() -> None:
    layer = keras.layers.Dense(4, name="dense")
    layer.build((None, 6))
    assert keras_variable(layer.kernel.value) == KerasVariable("dense/kernel", (6, 4))
    assert keras_variable(tf.Variable([1.0])) is None


def test_variables_of_a_strategy_of_tensorflow_are_made_as_ever() -> None:
    with tf.distribute.MirroredStrategy(["cpu:0"]).scope():
        variable = keras.Variable([1.0, 2.0], name="mirrored")
    described = keras_variable(variable.value)
    assert described is not None and described.path == "mirrored"
