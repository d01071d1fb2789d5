"""AutoGraph converts the script's code, and none of the code between that and TensorFlow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from tensorflow.python.autograph.pyct import transpiler

import autodist
from autodist import AutoDist, ResourceSpec
from autodist.batch.examples import rows_to_read
from autodist.capture.keras.own_batches import own_arrays
from autodist.reading.element_sharding import own_elements
from autodist.tf_compat.do_not_convert import converting, ours

OURS = [Path(autodist.__file__).parent, *(Path(__file__).parents[2] / name for name in ("kernels", "strategies"))]


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of the functions that AutoGraph reads; none of them is ours."""
    codes = []
    plain = transpiler.PyToPy.transform_function

    def transform(self, function, context):
        codes.append(function.__code__)
        return plain(self, function, context)

    monkeypatch.setattr(transpiler.PyToPy, "transform_function", transform)
    names: list[str] = []
    yield names
    assert names == [code.co_name for code in codes]
    assert not [code for code in codes if any(Path(code.co_filename).is_relative_to(folder) for folder in OURS)]


def machines() -> AutoDist:
    return AutoDist(resource_spec=ResourceSpec.from_dict({"nodes": [{"address": "localhost", "cpus": [0, 1]}]}))


def doubled(x):
    while tf.reduce_max(x) < 8.0:
        x = 2.0 * x
    return x


def test_of_a_step_what_the_script_has_written_is_read(read: list[str]) -> None:
    with machines().scope() as ad:
        weight = tf.Variable([[1.0], [2.0]])

        @ad.function
        def step(data, tables):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(doubled(weight)[0] * data["x"] @ weight)
                if weight[1, 0] > 1.0:
                    loss = 3.0 * loss
            weight.assign_sub(0.1 * tape.gradient(loss, weight))
            return loss

        # ones @ (1, 2), in threes, times the doubled weight's first.
        assert float(step({"x": tf.ones((4, 2))}, tf.ones((4,)))) == pytest.approx(3 * 3 * 4)
    read += ["step", "doubled"]


def test_of_fit_and_its_data_what_the_script_has_written_is_read(read: list[str]) -> None:
    class Model(keras.Model):
        def train_step(self, data):
            x, y = data
            if self.optimizer.iterations >= 0:
                y = 2 * y
            return super().train_step((x, y))

    def scaled(x, y):
        return 2 * x, y

    inputs = keras.Input((2,))
    x, y = np.ones((8, 2), "float32"), np.ones((8, 1), "float32")
    with machines().scope():
        model = Model(inputs, keras.layers.Dense(1)(inputs))
        model.compile("sgd", "mse")
        model.fit(x, y, batch_size=4, validation_data=(x, y), verbose=0)
        model.fit(tf.data.Dataset.from_tensor_slices((x, y)).map(scaled).batch(4), shuffle=False, verbose=0)
    read += ["train_step", "scaled"]


def test_of_data_of_which_a_worker_reads_its_part_what_the_script_has_written_is_read(read: list[str]) -> None:
    def scaled(x):
        return 2 * x

    rows = rows_to_read([0, 1], 1)
    data = tf.data.Dataset.range(8).map(scaled).batch(4)
    found = own_elements(data, rows).own
    assert found is not None
    np.testing.assert_array_equal(list(found), [[4, 6], [12, 14]])
    arrays = own_arrays(ArrayDataAdapter(np.arange(8), batch_size=4), rows)
    assert arrays is not None
    np.testing.assert_array_equal(list(arrays), [[2, 3], [6, 7]])
    read += ["scaled"]


def test_what_one_of_ours_calls_of_the_script_is_read_once_it_is_called_so(read: list[str]) -> None:
    @ours
    def calls(x):
        return converting(doubled)(x)

    assert tf.function(calls)(tf.constant(3.0)).numpy() == 12
    read += ["doubled"]


def test_tensorflow_s_and_keras_s_functions_are_called_as_they_are(read: list[str]) -> None:
    assert tf.function(ours(converting(keras.ops.square)))(tf.constant(3.0)).numpy() == 9
    assert tf.function(ours(converting(tf.square)))(tf.constant(3.0)).numpy() == 9
