"""`keras.distribution` in the scope, around it and before it: honoured if it fits the run, else rejected."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.distribution import DataParallel, DeviceMesh, LayoutMap, ModelParallel
from keras.distribution import set_distribution as imported_before

from autodist import AutoDist, ResourceSpec
from autodist.capture.keras.distribution import checks
from autodist.errors import StrategyError
from tests.unit.test_keras_inputs import assert_fits_alike
from tests.versions import since_keras

pytestmark = pytest.mark.usefixtures("keras_in_float64", "untold")

REFUSED = r"keras.distribution's \w+ is set, .*(Set the distribution before AutoDist|does not support it: .*Remove it)"
X, Y = np.random.default_rng(0).normal(size=(11, 6)), np.random.default_rng(1).normal(size=(11, 2))


@pytest.fixture
def untold() -> None:
    checks._note_data_parallel.cache_clear()


def model_parallel() -> Any:
    mesh = DeviceMesh((1, 2), ["batch", "model"], ["cpu:0", "cpu:1"])
    layouts = LayoutMap(mesh)
    layouts["dense.*kernel"] = (None, "model")
    return ModelParallel(layout_map=layouts, batch_dim_name="batch")


class Own(DataParallel):
    """A script's own subclass, with any settings."""


def autodist(replicas: int = 2) -> AutoDist:
    node = {"address": "localhost", "cpus": list(range(replicas))}
    return AutoDist(resource_spec=ResourceSpec.from_dict({"nodes": [node]}))


def dense() -> keras.Model:
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    return model


@pytest.mark.feature("fit", "step: `keras.distribution.DataParallel`")
@pytest.mark.parametrize(
    ("make", "is_before"), [(DataParallel, True), (lambda: DataParallel(devices=[f"cpu:{k}" for k in range(7)]), False)]
)
def test_data_parallel_trains_as_one_device_on_the_replicas_of_the_yaml_and_is_told_once(
    make: Any, is_before: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "autodist")
    if is_before:
        keras.distribution.set_distribution(make())

    def made() -> keras.Model:
        if not is_before:
            keras.distribution.set_distribution(make())
        return dense()

    def fit(model: keras.Model) -> Any:
        history = model.fit(X, Y, batch_size=4, epochs=2, shuffle=False, verbose=0)
        if not is_before:
            keras.distribution.set_distribution(None)  # the one of the run on one device
        return history

    assert_fits_alike(made, fit)
    said = [record.getMessage() for record in caplog.records]
    assert len([one for one in said if one.startswith("AutoDist trains as keras.distribution.DataParallel does")]) == 1


@pytest.mark.parametrize("make", [model_parallel, Own])
def test_what_autodist_does_not_do_is_refused_by_name_where_it_is_set(make: Any) -> None:
    other = make()
    with autodist().scope():
        with pytest.raises(StrategyError, match=REFUSED) as raised:
            keras.distribution.set_distribution(other)
        with pytest.raises(StrategyError, match=REFUSED), other.scope():
            pass
        assert keras.distribution.distribution() is None
    assert type(other).__name__ in str(raised.value)


def rows(mesh: tuple[int, int] = (2, 1)) -> ModelParallel:
    """A distribution whose model axis has one place, so that one worker may have all rows."""
    layouts = LayoutMap(DeviceMesh(mesh, ["batch", "model"]))
    layouts[".*kernel"] = (None, "model")
    return ModelParallel(layout_map=layouts, batch_dim_name="batch")


def test_model_parallel_around_autodist_trains_as_one_device() -> None:
    with rows().scope():
        assert_fits_alike(dense, lambda model: model.fit(X, Y, batch_size=4, epochs=2, shuffle=False, verbose=0))


@pytest.mark.feature("function", "step: `keras.distribution.ModelParallel`")
@pytest.mark.parametrize("make", [rows, lambda: rows()._layout_map])
def test_a_model_parallel_or_a_layout_map_as_strategy_trains_a_step_as_one_device(make: Any) -> None:
    def trained(decorate: Any) -> np.ndarray:
        keras.utils.set_random_seed(1)
        model = dense()
        weights = [one.value for one in model.trainable_variables]

        @decorate
        def step(x: tf.Tensor, y: tf.Tensor) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(model(x) - y))
            for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
                weight.assign_sub(0.1 * gradient)

        for _ in range(2):
            step(X, Y)
        return np.concatenate([np.ravel(weight) for weight in weights])

    expected = trained(tf.function)
    node = {"address": "localhost", "cpus": [0, 1]}
    with AutoDist(resource_spec=ResourceSpec.from_dict({"nodes": [node]}), strategy=make()).scope() as ad:
        found = trained(ad.function)
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    assert type(ad._run.builder).__name__ == "Mesh"


def test_a_mesh_that_does_not_fit_the_machines_is_refused_with_its_place() -> None:
    keras.distribution.set_distribution(rows((3, 1)))
    with pytest.raises(StrategyError, match=r"The DeviceMesh {batch: 3, model: 1} .* does not fit the run: .*3 places"):
        autodist()


def test_a_mesh_that_was_refused_is_not_refused_again_for_the_next_autodist() -> None:
    refused = rows((3, 1))  # a prompt keeps it, as its exception does
    keras.distribution.set_distribution(refused)
    with pytest.raises(StrategyError, match="3 places"):
        autodist()
    keras.distribution.set_distribution(None)
    with autodist().scope():
        assert keras.distribution.distribution() is None
    assert refused.device_mesh.shape == (3, 1)


def test_a_data_parallel_as_strategy_is_the_strategy_of_the_yaml() -> None:
    spec = ResourceSpec.from_dict({"nodes": [{"address": "localhost", "cpus": [0, 1]}], "strategy": "PS"})
    with AutoDist(resource_spec=spec, strategy=DataParallel()).scope() as ad:
        model = dense()
        model.fit(X, Y, verbose=0)
    assert type(ad._run.builder).__name__ == "PS"


def test_a_class_of_the_script_as_strategy_is_refused_in_the_same_words() -> None:
    node = {"address": "localhost", "cpus": [0, 1]}
    with pytest.raises(StrategyError, match=REFUSED):
        AutoDist(resource_spec=ResourceSpec.from_dict({"nodes": [node]}), strategy=Own())


def test_a_strategy_of_the_yaml_and_one_of_keras_are_refused_with_both_places(tmp_path: Path) -> None:
    cluster = tmp_path / "cluster.yml"
    cluster.write_text("nodes: [{address: localhost, cpus: [0, 1]}]\nstrategy:\n  builder: PS\n")
    keras.distribution.set_distribution(model_parallel())
    disagreeing = r"the DeviceMesh {batch: 1, model: 2} \(.*\), and .*cluster.yml:3: strategy.builder chooses another"
    with pytest.raises(StrategyError, match=disagreeing), AutoDist(cluster).scope():
        pass


def test_one_set_after_autodist_and_before_its_scope_is_refused() -> None:
    other, ad = model_parallel(), autodist()
    with other.scope(), pytest.raises(StrategyError, match=REFUSED), ad.scope():
        pass
    keras.distribution.set_distribution(other)
    with pytest.raises(StrategyError, match=REFUSED), ad.scope():
        pass
    keras.distribution.set_distribution(None)
    with ad.scope():
        keras.distribution.set_distribution(None)


def test_one_that_is_set_by_a_name_imported_before_is_refused_at_the_end_of_the_scope_and_in_fit() -> None:
    ad = autodist()
    with ad.scope():
        model = dense()
    with pytest.raises(StrategyError, match=REFUSED), ad.scope():
        imported_before(model_parallel())
    with pytest.raises(StrategyError, match="was made before keras.distribution's ModelParallel was set"):
        model.fit(X, Y, verbose=0)


def test_one_that_is_set_after_the_scope_is_refused_by_the_step() -> None:
    ad = autodist()
    with ad.scope():
        weight = tf.Variable(np.ones((6, 2)))

        @ad.function
        def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(x @ weight - y))
            weight.assign_sub(0.1 * tape.gradient(loss, weight))
            return loss

    keras.distribution.set_distribution(model_parallel())
    with pytest.raises(StrategyError, match=REFUSED):
        step(X, Y)
    keras.distribution.set_distribution(None)
    assert np.isfinite(step(X, Y))
    assert keras.distribution.set_distribution is imported_before


def test_one_that_is_set_after_a_step_was_traced_is_refused_by_the_next_call() -> None:
    ad = autodist()
    with ad.scope():
        model = dense()
        weight = tf.Variable(np.ones((6, 2)))

        @ad.function
        def step(x: tf.Tensor, y: tf.Tensor) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(x @ weight - y))
            weight.assign_sub(0.1 * tape.gradient(loss, weight))

    step(X, Y)
    model.fit(X, Y, verbose=0)
    before = weight.numpy()
    keras.distribution.set_distribution(model_parallel())
    for call in (lambda: step(X, Y), lambda: model.fit(X, Y, verbose=0)):
        with pytest.raises(StrategyError, match=REFUSED):
            call()
    np.testing.assert_array_equal(weight, before)


def test_a_model_that_was_built_under_it_is_refused_after_it() -> None:
    ad = autodist()
    with model_parallel().scope():
        model = dense()
    with ad.scope():
        model.compile("sgd", "mse")
        with pytest.raises(StrategyError, match=REFUSED) as raised:
            model.fit(X, Y, verbose=0)
    assert not hasattr(raised.value, "__notes__")  # such as one on lengths that are None


def test_a_model_that_was_built_before_it_is_refused_by_its_first_variable() -> None:
    ad = autodist()
    with ad.scope():
        model = dense()
    keras.distribution.set_distribution(model_parallel())
    with pytest.raises(StrategyError, match=f"The variable {model.weights[0].path} was made before"):
        model.fit(X, Y, verbose=0)


class Constrains(keras.layers.Layer):
    """Requests a layout for its output, as layers of JAX users do."""

    def call(self, x: Any) -> Any:
        layout = keras.distribution.TensorLayout(("batch", "model"), DeviceMesh((1, 2), ["batch", "model"]))
        return keras.distribution.distribute_tensor(x, layout)


def test_a_layout_of_a_tensor_without_a_distribution_is_refused_in_a_step_and_returns_the_tensor_elsewhere() -> None:
    refused = r"distribute_tensor \(test_keras_distribution.py:\d+\) requests the layout \('batch', 'model'\) for"
    with autodist().scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2), Constrains()])
        model.compile("sgd", "mse")
        np.testing.assert_array_equal(model(X), model.layers[0](X))
        with pytest.raises(StrategyError, match=refused):
            model.fit(X, Y, verbose=0)
    with tf.Graph().as_default(), autodist().scope(), pytest.raises(StrategyError, match=refused):
        Constrains()(tf.compat.v1.placeholder(tf.float64, [None, 6]))


def test_keras_lists_the_places_of_the_run() -> None:
    nodes = [{"address": "localhost", "cpus": [0, 1, 2, 3], "workers": 1}]
    AutoDist(resource_spec=ResourceSpec.from_dict({"nodes": nodes}))
    assert keras.distribution.list_devices() == ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]
    assert keras.distribution.list_devices("GPU") == []


def test_keras_lists_the_places_of_the_scope_that_was_opened_last() -> None:
    two, three = autodist(2), autodist(3)
    assert len(keras.distribution.list_devices()) == 3
    with two.scope():
        assert keras.distribution.list_devices() == ["cpu:0", "cpu:1"]
        assert DeviceMesh((1, 2), ["batch", "model"]).devices.tolist() == [["cpu:0", "cpu:1"]]
    with three.scope():
        assert len(keras.distribution.list_devices()) == 3


@since_keras("3.15", "layouts of variables")
def test_a_layout_of_a_variable_is_refused_in_a_step_and_a_session() -> None:
    layout = keras.distribution.TensorLayout(("model",), DeviceMesh((2,), ["model"]))
    ad = autodist()
    with ad.scope():
        own = keras.Variable(np.ones(6), layout=layout, name="own")

        @ad.function
        def step(x: tf.Tensor) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(x @ own.value[:, None])
            own.assign(own - tape.gradient(loss, own.value))

        with pytest.raises(StrategyError, match="The variable own is made with a layout"):
            step(X)
    with tf.Graph().as_default(), ad.scope():
        weight = keras.Variable(np.ones(6), layout=layout, name="weight").value
        loss = tf.reduce_mean(tf.compat.v1.placeholder(tf.float64, [None, 6]) @ weight[:, None])
        tf.compat.v1.train.GradientDescentOptimizer(0.1).minimize(loss, var_list=[weight])
        with pytest.raises(StrategyError, match="The variable weight is made with a layout"):
            ad.create_distributed_session()
