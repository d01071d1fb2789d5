"""Inputs of `fit` besides dense arrays, and the options of `compile`: as on one device."""

from __future__ import annotations

import logging

import keras
import numpy as np
import pytest
import tensorflow as tf

from autodist import AutoDist, ResourceSpec
from autodist.errors import CaptureError
from tests.versions import since_keras

DRAWS = np.random.default_rng(0)
X = DRAWS.normal(size=(11, 6))
Y = DRAWS.normal(size=(11, 2))

pytestmark = pytest.mark.usefixtures("keras_in_float64")


def autodist(replicas=2):
    node = {"address": "localhost", "cpus": list(range(replicas))}
    return AutoDist(resource_spec=ResourceSpec.from_dict({"nodes": [node]}))


def assert_fits_alike(make, fit):
    """A model that is fitted on two replicas has the weights and the losses of one device."""
    keras.utils.set_random_seed(1)
    alone = make()
    expected = fit(alone).history
    keras.utils.set_random_seed(1)
    with autodist().scope():
        model = make()
        found = fit(model).history
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-12, err_msg=name)
    for mine, its in zip(model.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(mine, its, rtol=1e-12, atol=1e-12)


def dense(**options):
    inputs = keras.Input((6,))
    model = keras.Model(inputs, keras.layers.Dense(2)(keras.layers.Dense(3, activation="tanh")(inputs)))
    model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"], **options)
    return model


# -- data sets of ad.distribute_dataset ------------------------------------------------------------------------------


@pytest.mark.parametrize("is_built_before", [False, True])
def test_fit_evaluate_and_predict_take_the_whole_batches_of_a_distributed_data_set(is_built_before):
    """As a script passes that of a strategy of tf.distribute to `fit` (tensorflow/tensorflow#41290)."""
    batches = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)
    keras.utils.set_random_seed(1)
    alone = dense()
    alone.fit(batches, validation_data=batches, verbose=0, shuffle=False)
    keras.utils.set_random_seed(1)
    early = dense()
    ad = autodist()
    with ad.scope():
        model = early if is_built_before else keras.models.clone_model(early)
        model.set_weights(early.get_weights())
        if not is_built_before:
            model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
        given = ad.distribute_dataset(batches)
        model.fit(given, validation_data=given, verbose=0, shuffle=False)
        for mine, its in zip(model.get_weights(), alone.get_weights(), strict=True):
            np.testing.assert_allclose(mine, its, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(model.evaluate(given, verbose=0), alone.evaluate(batches, verbose=0), rtol=1e-12)
        rows = batches.map(lambda x, y: x)
        found = model.predict(ad.distribute_dataset(rows), verbose=0)
    np.testing.assert_allclose(found, alone.predict(rows, verbose=0), rtol=1e-12)


def test_a_distributed_data_set_is_refused_if_each_worker_passes_its_own_batches():
    spec = {"nodes": [{"address": "localhost", "cpus": [0, 1]}], "batch": "per_worker"}
    ad = AutoDist(resource_spec=ResourceSpec.from_dict(spec))
    with ad.scope(), pytest.raises(CaptureError, match="remove batch: per_worker"):
        dense().fit(ad.distribute_dataset(tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)), verbose=0)


def per_batch():
    for start in (0, 4, 8):
        yield X[start : start + 4], Y[start : start + 4]


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        return list(per_batch())[index]


@pytest.mark.parametrize("make", [per_batch, Batches])
def test_fit_takes_a_distributed_generator_or_py_dataset_as_batches(make):
    with autodist().scope() as ad:
        model = dense()
        model.fit(ad.distribute_dataset(make()), steps_per_epoch=3, verbose=0, shuffle=False)
    assert int(model.optimizer.iterations) == 3


@pytest.mark.parametrize("kind", [list, tuple, iter])
def test_other_distributed_data_are_refused_since_keras_would_take_a_list_for_the_inputs(kind):
    with autodist().scope() as ad:
        model = dense()
        model.compile("sgd", "mse")
        given = ad.distribute_dataset(kind(list(per_batch())))
        for method in (model.fit, model.evaluate, model.predict):
            with pytest.raises(CaptureError, match=r"divided a (list|tuple).*Pass a tf.data.Dataset or a keras"):
                method(given, verbose=0)
        with pytest.raises(CaptureError, match="does not take as batches"):
            model.fit(X, Y, validation_data=given, verbose=0)


def test_fit_refuses_a_distributed_data_set_with_a_restored_position_and_evaluates_on_it():
    """It would begin at the first batch, without a word."""
    batches = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)
    with autodist().scope() as ad:
        model = dense()
        taken = ad.distribute_dataset(batches)
        given = ad.distribute_dataset(batches)
        given.deserialize(taken.serialize())
        model.fit(given, verbose=0, shuffle=False)  # the beginning
        next(iterator := iter(taken))
        given.deserialize(taken.serialize())
        model.evaluate(given, verbose=0)
        with pytest.raises(CaptureError, match=r"batch 1 of its iteration 1.*ad.checkpoint_callback.*loop over it"):
            model.fit(given, verbose=0)
        del iterator


# -- inputs that may be left out -------------------------------------------------------------------------------------


def functional():
    first, second = keras.Input((6,), name="first"), keras.Input((6,), name="second", optional=True)
    model = keras.Model([first, second], Sum()([keras.layers.Dense(2)(first), second]))
    model.compile("sgd", "mse")
    return model


class Sum(keras.layers.Layer):
    def call(self, inputs):
        first, second = inputs
        return first if second is None else first + second[:, :2]

    def compute_output_shape(self, shapes):
        return shapes[0]


@pytest.mark.feature("fit", "data: optional inputs, left out")
@pytest.mark.feature("fit", "data: generators")
@since_keras("3.12", "optional inputs in generators")
@pytest.mark.parametrize("with_second", [False, True])
def test_a_generator_may_leave_out_an_optional_input(with_second):
    def batches():
        while True:
            for start in (0, 4, 8):
                rows = slice(start, start + 4)
                yield (X[rows], X[rows] if with_second else None), Y[rows]

    assert_fits_alike(functional, lambda m: m.fit(batches(), steps_per_epoch=3, epochs=2, verbose=0, shuffle=False))


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_data_whose_length_is_not_known_are_a_step_for_each_batch():
    """Keras alone begins one more step in each epoch, and runs its writes that do not depend on data: the count of
    steps.
    """
    batches = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)
    keras.utils.set_random_seed(1)
    alone = dense()
    alone.fit(batches, epochs=3, verbose=0, shuffle=False)
    keras.utils.set_random_seed(1)
    with autodist().scope():
        model = dense()
        model.fit(batches.filter(lambda x, y: True), epochs=3, verbose=0, shuffle=False)
    assert int(model.optimizer.iterations) == int(alone.optimizer.iterations) == 9
    for mine, its in zip(model.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(mine, its, rtol=1e-12, atol=1e-12)


def test_what_fails_for_a_none_of_the_scripts_own_says_nothing_of_batch_axes():
    with autodist().scope() as ad:

        @ad.function
        def step(x, y):
            return tf.reduce_mean(x + y)

        @ad.function
        def by_length(x):
            return tf.zeros(x.shape[0])

    with pytest.raises((TypeError, ValueError), match="None") as seen:
        step(X, None)
    assert not hasattr(seen.value, "__notes__")
    with pytest.raises((TypeError, ValueError), match="None") as seen:
        by_length(X)
    assert "batch axis open" in seen.value.__notes__[0]


# -- how it is compiled ----------------------------------------------------------------------------------------------


@pytest.mark.feature("fit", "step: `run_eagerly=True`")
def test_a_model_that_is_to_run_eagerly_is_compiled_all_the_same(caplog):
    with caplog.at_level(logging.WARNING, "autodist"):
        assert_fits_alike(
            lambda: dense(run_eagerly=True), lambda m: m.fit(X, Y, batch_size=4, epochs=2, verbose=0, shuffle=False)
        )
    assert [r.message for r in caplog.records if "run_eagerly=True" in r.message] != []


def test_a_step_that_needs_values_says_why_it_has_none():
    class Reading(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(2)

        def call(self, x):
            return self.dense(x)

        def train_step(self, data):
            return {"first": float(data[0][0, 0].numpy())}

    with autodist().scope():
        model = Reading()
        model.compile("sgd", "mse", run_eagerly=True)
    with pytest.raises(AttributeError, match="numpy") as seen:
        model.fit(X, Y, verbose=0)
    assert "AutoDist compiles its steps all the same" in seen.value.__notes__[0]


@pytest.mark.filterwarnings("ignore:Even though")  # of tf.data's functions
def test_a_model_trains_where_functions_are_to_run_eagerly():
    tf.config.run_functions_eagerly(True)
    try:
        assert_fits_alike(dense, lambda m: m.fit(X, Y, batch_size=4, verbose=0, shuffle=False))
    finally:
        tf.config.run_functions_eagerly(False)


# -- strategies of tf.distribute -------------------------------------------------------------------------------------

REFUSED = r"tf.distribute's MirroredStrategy, .*Remove the strategy: ad.scope\(\)"


@pytest.fixture
def strategy():
    return tf.distribute.MirroredStrategy(["cpu:0"])


def test_a_strategy_within_the_scope_is_refused(strategy):
    with autodist().scope(), pytest.raises(CaptureError, match=REFUSED):
        strategy.scope()


def test_the_scope_within_a_strategy_is_refused(strategy):
    ad = autodist()
    with strategy.scope(), pytest.raises(CaptureError, match=REFUSED), ad.scope():
        pass


@pytest.mark.feature("function", "step: a `tf.distribute` strategy", refused="CaptureError")
def test_a_strategy_within_a_step_is_refused(strategy):
    with autodist().scope() as ad:

        @ad.function
        def step(x):
            return strategy.run(tf.reduce_mean, (x,))

    with pytest.raises(CaptureError, match=REFUSED):
        step(X)


@pytest.mark.feature("fit", "step: a `tf.distribute` strategy", refused="CaptureError")
def test_a_model_that_was_built_under_a_strategy_is_refused(strategy):
    with strategy.scope():
        model = dense()
    with autodist().scope(), pytest.raises(CaptureError, match=REFUSED):
        model.fit(X, Y, verbose=0)


def test_the_strategy_that_is_there_without_one_shares_out_nothing():
    with autodist().scope(), tf.distribute.get_strategy().scope():
        model = dense()
    model.fit(X, Y, verbose=0)
    assert int(model.optimizer.iterations) == 1
    with strategy_scope() as used:
        assert tf.distribute.get_strategy() is used


def strategy_scope():
    return tf.distribute.OneDeviceStrategy("cpu:0").scope()
