"""The choice of what XLA compiles (`xla: auto`): the measurement of a step's forms, the decision, and trainings."""

from __future__ import annotations

import functools
import logging

import keras
import numpy as np
import pytest
import tensorflow as tf

from autodist import AutoDist
from autodist.proto.strategy_pb2 import Compilation
from autodist.resources import ResourceSpec
from autodist.runs.measuring import compilation
from autodist.runs.measuring.compilation import CompilationTimes, choose_compilation, in_words, measure_compilation
from autodist.runs.measuring.copied_step import OneReplica
from autodist.runs.measuring.measurable import CannotMeasure
from tests.unit.kernels.dense_steps import dense_step
from tests.unit.kernels.in_one_process import capture

REPLICA = OneReplica.of(ResourceSpec.from_dict({"nodes": [{"address": "localhost", "cpus": [0]}]}).workers, 0)
X = np.random.default_rng(0).normal(size=(6, 4))


def times(nothing, whole, updates, marked=None):
    return CompilationTimes(nothing, marked, whole, updates)


@pytest.mark.parametrize(
    "measured, chosen",
    [
        ([times(1.0, 0.5, 0.8)], "the computation and the updates"),
        ([times(1.0, 0.5, 0.99)], "the computation"),
        ([times(1.0, 0.97, 0.8)], "the updates"),
        ([times(1.0, 6.0, 1.1)], "nothing"),
        ([times(1.0, 0.9, 1.0, marked=0.6)], "the marked functions"),
        ([times(1.0, 0.5, 1.0, marked=0.6)], "the computation"),
        ([times(1.0, 0.5, 0.8), times(3.0, 3.1, 2.0)], "the updates"),  # the slowest worker
    ],
)
def test_what_makes_the_slowest_worker_faster_is_compiled(measured, chosen):
    assert in_words(choose_compilation(measured)) == chosen


def measured(captured, *values):
    batch = dict(zip(captured.inputs, values, strict=True))
    readers = {v.name: source.numpy for v, source in zip(captured.step.variables, captured.sources, strict=True)}
    return measure_compilation(captured.step, batch, readers, REPLICA, seconds=0.1)


def test_each_form_is_timed_and_the_variables_stay(keras_in_float64):
    captured = capture(dense_step(keras.optimizers.Adam()), X, jit_compile=True)
    before = [source.numpy() for source in captured.sources]
    found = measured(captured, X)
    assert min(found.nothing, found.whole, found.updates) > 0
    assert found.marked is None
    assert found.took < 60
    for source, value in zip(captured.sources, before, strict=True):
        np.testing.assert_array_equal(source.numpy(), value)


def test_functions_that_the_script_marks_are_a_form_of_their_own():
    weight = tf.Variable(tf.ones([4], tf.float64))

    @tf.function(jit_compile=True)
    def product(x):
        return tf.reduce_sum(tf.tanh(x) * weight)

    def step(x):
        with tf.GradientTape() as tape:
            loss = product(x)
        weight.assign_sub(0.1 * tape.gradient(loss, weight))
        return loss

    captured = capture(step, X)
    with pytest.raises(CannotMeasure, match="cannot build its loops for XLA"):
        measured(captured, X)
    assert measured(capture(step, X, jit_compile=True), X).marked > 0


def spec_of(xla):
    return ResourceSpec.from_dict({"nodes": [{"address": "localhost", "cpus": [0, 1]}], "xla": xla})


def fitted(ad):
    """Returns the losses of a `fit`, and the ops of the functions that XLA has compiled for it."""
    keras.utils.set_random_seed(1)
    x = np.random.default_rng(0).normal(size=(8, 5, 2))

    def fit():
        model = keras.Sequential([keras.Input((5, 2)), keras.layers.LSTM(3), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        return model.fit(x, x[:, 0, :1], batch_size=4, epochs=2, shuffle=False, verbose=0).history["loss"]

    if ad is None:
        return fit()
    with ad.scope():
        return fit()


@functools.cache
def losses_of_one_device():
    return fitted(None)


@pytest.fixture
def forms(monkeypatch):
    """Stands in for the measurement: XLA makes the computation faster; returns the replicas that measured."""
    found = []

    def measure(step, batch, variables, replica, seconds=0.0):
        assert step.has_loops_for_xla
        assert {len(value) for value in batch.values() if np.ndim(value)} == {4}
        found.append(replica.replicas)
        return times(1.0, 0.5, 1.0)

    monkeypatch.setattr(compilation, "measure_compilation", measure)
    return found


@pytest.mark.feature("fit", "precision: `xla` in the YAML")
@pytest.mark.parametrize("xla, compiles, measures", [(True, True, 0), ("auto", True, 1), (False, False, 0)])
def test_a_fit_has_the_losses_of_one_device(keras_in_float64, caplog, forms, xla, compiles, measures):
    caplog.set_level(logging.INFO, "autodist")
    ad = AutoDist(resource_spec=spec_of(xla), strategy="AllReduce")
    assert fitted(ad) == pytest.approx(losses_of_one_device(), rel=1e-12)
    assert ad._run.steps.strategy.graph_config.compilation.computation == (
        Compilation.WHOLE if compiles else Compilation.NOTHING
    )
    assert forms == [2] * measures
    logged = (
        "xla: auto compiles the computation of train_step. A step on one replica takes 1 s without XLA, " in caplog.text
    )
    assert logged is bool(measures)


def test_a_step_that_cannot_be_measured_is_as_the_script_requests(keras_in_float64, caplog, monkeypatch):
    def refuse(*arguments):
        raise CannotMeasure("it prints")

    monkeypatch.setattr(compilation, "measure_compilation", refuse)
    caplog.set_level(logging.INFO, "autodist")
    ad = AutoDist(resource_spec=spec_of("auto"), strategy="AllReduce")
    assert fitted(ad) == pytest.approx(losses_of_one_device(), rel=1e-12)
    assert not ad._run.steps.strategy.graph_config.HasField("compilation")
    assert (
        "could not measure train_step on localhost (it prints), so XLA compiles what the script requests" in caplog.text
    )


@pytest.mark.feature("function", "precision: `xla` in the YAML")
def test_a_loop_that_cannot_be_built_for_xla_stays_as_it_is(caplog):
    """XLA must know its maximum of iterations for the gradient, and TensorFlow itself need not."""
    weight = tf.Variable(1.0)

    def train(wrap):
        @wrap
        def step(x):
            with tf.GradientTape() as tape:
                _, product = tf.while_loop(lambda k, _: k < tf.shape(x)[0], lambda k, y: (k + 1, y * weight), (0, x))
                loss = tf.reduce_sum(product)
            weight.assign_sub(0.01 * tape.gradient(loss, weight))
            return loss

        weight.assign(1.0)
        return [float(step(tf.constant([1.0, 2.0]))) for _ in range(2)]

    caplog.set_level(logging.INFO, "autodist")
    spec = ResourceSpec.from_dict({"nodes": [{"address": "localhost", "cpus": [0]}], "xla": "auto"})
    ad = AutoDist(resource_spec=spec, strategy="AllReduce")
    with ad.scope():
        found = train(ad.function)
    assert found == train(tf.function)
    assert "(the step fails on one replica: XLA compilation requires a fixed tensor list size" in caplog.text


@pytest.mark.feature("session", "precision: `xla` in the YAML")
@pytest.mark.parametrize("xla", [True, False, "auto"])
def test_a_session_has_the_losses_of_one_device(caplog, xla):
    x = np.random.default_rng(0).normal(size=(8, 4))

    def losses(session_of):
        with tf.Graph().as_default():
            fed = tf.compat.v1.placeholder(tf.float64, [None, 4])
            weight = tf.compat.v1.get_variable("weight", initializer=np.ones((4, 3)))
            loss = tf.reduce_mean(tf.square(tf.tanh(fed @ weight)))
            train = tf.compat.v1.train.AdamOptimizer(0.1).minimize(loss)
            with session_of() as session:
                session.run(tf.compat.v1.global_variables_initializer())
                return [session.run([loss, train], {fed: x})[0] for _ in range(3)]

    caplog.set_level(logging.INFO, "autodist")
    expected = losses(tf.compat.v1.Session)
    ad = AutoDist(resource_spec=spec_of(xla), strategy="AllReduce")
    with ad.scope():
        found = losses(ad.create_distributed_session)
    assert found == pytest.approx(expected, rel=1e-12)
    assert ad._run.steps.strategy.graph_config.compilation.updates is (xla is True)
    assert ("its batch is not known before it runs" in caplog.text) is (xla == "auto")
