"""`ad.function` in the places where `tf.function` stands: methods, signatures, other functions."""

from __future__ import annotations

import dataclasses
import gc
import weakref

import numpy as np
import pytest
import tensorflow as tf

from autodist import AutoDist, ResourceSpec
from autodist.errors import CaptureError
from autodist.function_step import DistributedFunction

BATCHES = np.random.default_rng(0).normal(size=(3, 7, 2))


def autodist(replicas: int = 2) -> AutoDist:
    node = {"address": "localhost", "cpus": list(range(replicas))}
    return AutoDist(resource_spec=ResourceSpec.from_dict({"nodes": [node]}))


def descend(weight, x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(x @ weight))
    weight.assign_sub(0.1 * tape.gradient(loss, weight))
    return loss


def expected(value, batches=BATCHES):
    """The losses, and the weight at last, of one device."""
    weight = tf.Variable(value)
    return [float(descend(weight, x)) for x in batches], weight.numpy()


def assert_trains(step, weight, batches=BATCHES):
    wanted = expected(weight.numpy(), batches)
    np.testing.assert_allclose([float(step(x)) for x in batches], wanted[0], rtol=1e-12)
    np.testing.assert_allclose(weight.numpy(), wanted[1], rtol=1e-12)


def traces_of(function: DistributedFunction) -> int:
    return function.traces


# -- methods ---------------------------------------------------------------------------------------------------------


def trainer_class(ad, *decorators):
    def method(self, x):
        return descend(self.weight, x)

    for decorator in (ad.function, *decorators):
        method = decorator(method)

    @dataclasses.dataclass  # has no hash, and all are equal
    class Trainer:
        number: int = 0

        def __post_init__(self):
            self.weight = tf.Variable(np.ones((2, 1)))

        step = method

    return Trainer


@pytest.mark.feature("function", "step: a method as a step")
def test_each_instance_has_a_step_of_its_own():
    with autodist().scope() as ad:
        trainer_kind = trainer_class(ad)
        one, other = trainer_kind(), trainer_kind()
        other.weight.assign([[2.0], [3.0]])
    assert one == other
    assert_trains(one.step, one.weight)
    np.testing.assert_array_equal(other.weight, [[2.0], [3.0]])
    assert_trains(other.step, other.weight)
    assert (one.step.function.traces, other.step.function.traces, one.step.__name__) == (1, 1, "method")
    assert_trains(trainer_kind.step.__get__(one), one.weight)


def test_an_instance_lives_as_long_as_its_bound_step_and_no_longer():
    def trained():
        with autodist().scope() as ad:
            step = trainer_class(ad)().step
        gc.collect()
        assert_trains(step, step.__self__.weight)
        return weakref.ref(step.__self__)

    instance = trained()
    gc.collect()
    assert instance() is None


def test_an_instance_of_slots_has_a_step():
    with autodist().scope() as ad:

        class Trainer:
            __slots__ = ("weight",)

            @ad.function
            def __call__(self, x):
                return descend(self.weight, x)

        trainer = Trainer()
        trainer.weight = tf.Variable(np.ones((2, 1)))
    assert_trains(trainer, trainer.weight)


@pytest.mark.parametrize("decorators", [(0, classmethod), (0, staticmethod), (staticmethod, 0)])
def test_methods_of_classes_and_functions_in_classes_are_steps(decorators):
    with autodist().scope() as ad:
        weight = tf.Variable(np.ones((2, 1)))

        def of_class(kind, x):
            assert kind is Trainer
            return descend(weight, x)

        def alone(x):
            return descend(weight, x)

        method = of_class if classmethod in decorators else alone
        for decorator in decorators:
            method = (decorator or ad.function)(method)

        class Trainer:
            step = method

    assert_trains(Trainer.step, weight)
    assert_trains(Trainer().step, weight)


def test_a_method_has_options():
    with autodist().scope() as ad:

        class Trainer:
            def __init__(self):
                self.weight = tf.Variable(np.ones((2, 1)))

            @ad.function(batch_axis={"x": 1}, input_signature=[tf.TensorSpec([2, None], tf.float64)])
            def step(self, x):
                return descend(self.weight, tf.transpose(x))

        trainer = Trainer()
    assert_trains(lambda x: trainer.step(np.ascontiguousarray(x.T)), trainer.weight)


# -- signatures ------------------------------------------------------------------------------------------------------


def padded_sum(ad, weight, **options):
    @ad.function(**options)
    def step(x, scale):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.reduce_sum(x * weight, axis=1)) * scale
        weight.assign_sub(0.1 * tape.gradient(loss, weight))
        return loss

    return step


@pytest.mark.feature("function", "step: `input_signature`, `reduce_retracing`")
@pytest.mark.parametrize(
    ("options", "traces"),
    [
        ({"input_signature": (tf.TensorSpec([None, None], tf.float64), tf.TensorSpec([], tf.float64))}, 1),
        ({"input_signature": (tf.TensorSpec(None, tf.float64), tf.TensorSpec([], tf.float64))}, 1),
        ({"reduce_retracing": True}, 2),
        ({}, 4),
    ],
)
def test_lengths_that_differ_are_traced_as_is_asked(options, traces):
    lengths = (3, 5, 4, 3, 6)
    with autodist().scope() as ad:
        weight = tf.Variable(1.0, dtype=tf.float64)
        step = padded_sum(ad, weight, **options)
    value = 1.0
    for seed, length in enumerate(lengths):
        x = np.random.default_rng(seed).normal(size=(5, length))
        slope = x.sum(axis=1).mean() * 2.0
        np.testing.assert_allclose(float(step(x, 2.0)), slope * value, rtol=1e-12)
        value -= 0.1 * slope
    np.testing.assert_allclose(float(weight), value, rtol=1e-12)
    assert traces_of(step) == traces


def test_numbers_and_lists_become_what_the_signature_says():
    seen = []
    with autodist(1).scope() as ad:
        weight = tf.Variable(1.0)

        @ad.function(input_signature=[{"x": tf.TensorSpec([None], tf.float32)}, tf.TensorSpec([], tf.float32)])
        def step(batch, rate=0.5):
            seen.append(rate.dtype)
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(batch["x"] * weight)
            weight.assign_sub(rate * tape.gradient(loss, weight))
            return loss

    assert float(step({"x": np.array([1.0, 3.0], np.float32)})) == 2.0
    assert float(step({"x": tf.constant([2.0])}, rate=1)) == 0.0
    assert seen == [tf.float32]
    with pytest.raises(TypeError, match="float64"):
        step({"x": tf.constant([2.0], tf.float64)})
    with pytest.raises(TypeError, match="shape"):
        step({"x": np.ones((2, 2), np.float32)})


def test_a_nested_function_gets_tensors_by_its_signature():
    with autodist().scope() as ad:
        weight = tf.Variable(np.ones((2, 1)))

        @tf.function(input_signature=[tf.TensorSpec([], tf.float64)])
        def half(number):
            return tf.cast(number, number.dtype) / 2.0

        @ad.function
        def step(x):
            return half(2.0) * descend(weight, x)

    assert_trains(step, weight)


def test_python_values_that_have_no_hash_are_known_by_themselves():
    with autodist(1).scope() as ad:
        weight = tf.Variable(1.0)

        @ad.function
        def step(x, options):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(x * weight)
            weight.assign_sub(0.0 * tape.gradient(loss, weight))
            return loss * max(options.values)

    class Options:
        __hash__ = None

        def __init__(self, *values):
            self.values = values

    x = np.ones(2, np.float32)
    assert [float(step(x, Options(k))) for k in (1, 2, 3)] == [1, 2, 3]
    assert step.traces == 3


@pytest.mark.parametrize("autograph", [True, False])
def test_autograph_is_as_asked(autograph):
    with autodist().scope() as ad:
        weight = tf.Variable(np.ones((2, 1)))

        @ad.function(autograph=autograph)
        def step(x):
            if tf.reduce_mean(weight) < 100.0:
                return descend(weight, x) * 1.0
            return tf.constant(0.0, tf.float64)

    if autograph:
        with pytest.raises(CaptureError, match="tf.cond"):
            step(BATCHES[0])
    else:
        with pytest.raises(TypeError, match="symbolic"):
            step(BATCHES[0])


# -- functions in functions ------------------------------------------------------------------------------------------


@pytest.mark.feature("function", "step: a step within a step")
@pytest.mark.parametrize("inner_options", [{}, {"batch": "global"}, {"jit_compile": True}])
def test_a_step_within_a_step_is_part_of_it(inner_options):
    with autodist().scope() as ad:
        weight = tf.Variable(np.ones((2, 1)))

        @ad.function(**inner_options)
        def inner(x):
            loss = tf.zeros([], tf.float64)
            for k in range(1):
                loss += descend(weight, x) * tf.cast(k + 1, tf.float64)
            return loss

        @tf.function
        def between(x):
            return inner(x)

        @ad.function
        def outer(x):
            assert_tensor(x)
            return between(x)

    assert_trains(outer, weight)
    assert (outer.traces, inner.traces) == (1, 0)


def assert_tensor(x):
    assert isinstance(x, tf.Tensor) and not hasattr(x, "numpy")


def test_a_method_within_a_step_is_part_of_it():
    with autodist().scope() as ad:
        trainer = trainer_class(ad)()

        @ad.function
        def outer(x):
            return trainer.step(x)

    assert_trains(outer, trainer.weight)


@pytest.mark.feature("function", "step: a training step within a `tf.function`", refused="CaptureError")
def test_a_step_that_trains_is_refused_within_a_function():
    with autodist().scope() as ad:
        weight = tf.Variable(np.ones((2, 1)))

        @ad.function
        def step(x):
            return descend(weight, x)

        @tf.function
        def epoch(batches):
            for x in batches:
                step(x)

    message = "step trains .*tf.function, .*alone.*@ad.function in the place"
    with pytest.raises(CaptureError, match=message):
        tf.function(step)(tf.constant(BATCHES[0]))
    with pytest.raises(CaptureError, match=message):
        epoch(tf.data.Dataset.from_tensor_slices(BATCHES))
    np.testing.assert_array_equal(weight, np.ones((2, 1)))
    assert_trains(step, weight)


def test_a_function_that_evaluates_computes_the_whole_within_a_function():
    with autodist().scope() as ad:
        weight = tf.Variable(np.ones((2, 1)))

        @ad.function
        def evaluate(x):
            return tf.reduce_sum(x @ weight)

        @ad.function
        def train(x):
            return descend(weight, x)

    twice = tf.function(lambda x: 2.0 * evaluate(x))
    for x in BATCHES:
        train(x)
        np.testing.assert_allclose(twice(x), 2.0 * np.sum(x @ weight.numpy()), rtol=1e-12)
