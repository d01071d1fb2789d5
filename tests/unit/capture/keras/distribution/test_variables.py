"""Notes on variables that are made under a distribution or with a layout, and the refusals that they lead to."""

from __future__ import annotations

import keras
import pytest
import tensorflow as tf
from keras.distribution import DataParallel, DeviceMesh, TensorLayout

from autodist.capture.keras.distribution.variables import (
    KerasVariable,
    keras_variable,
    made_under,
    require_no_layout,
)
from autodist.errors import StrategyError
from tests.versions import since_keras


def mesh() -> DeviceMesh:
    return DeviceMesh((1, 2), ["batch", "model"])


@since_keras("3.15", "layouts of variables")
def test_variables_of_data_parallel_have_no_distribution_that_shards_them() -> None:
    with DataParallel().scope():
        variables = [keras.Variable([1.0, 2.0]), keras.Variable([1.0], layout=TensorLayout((None,), mesh()))]
    assert [made_under(variable.value) for variable in variables] == [None, None]
    require_no_layout(variable.value for variable in variables)


@since_keras("3.15", "layouts of variables")
def test_a_layout_of_a_variable_is_refused_without_a_distribution() -> None:
    variable = keras.Variable([1.0, 2.0], layout=TensorLayout(("model",), mesh()), name="own")
    with pytest.raises(StrategyError, match=r"The variable own is made with a layout, keras.Variable\(…, layout=…\)"):
        require_no_layout([variable.value])


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
