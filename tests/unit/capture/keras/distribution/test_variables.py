"""Variables that are made under a distribution, or with a layout, are refused by the steps that train them."""

from __future__ import annotations

import keras
import pytest
import tensorflow as tf
from keras.distribution import DataParallel, DeviceMesh, LayoutMap, ModelParallel, TensorLayout

from autodist.capture.keras.distribution.variables import KerasVariable, keras_variable, made_under, require_unsharded
from autodist.errors import StrategyError


def mesh() -> DeviceMesh:
    return DeviceMesh((1, 2), ["batch", "model"])


def test_a_variable_made_under_model_parallel_is_refused_after_its_scope() -> None:
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


def test_a_layout_of_a_variable_is_refused_under_any_distribution() -> None:
    variable = keras.Variable([1.0, 2.0], layout=TensorLayout(("model",), mesh()), name="own")
    with pytest.raises(StrategyError, match=r"The variable own is made with a layout, keras.Variable\(…, layout=…\)"):
        require_unsharded([variable.value])


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
