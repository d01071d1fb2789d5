"""`ad.function` on methods: each instance has a step of its own."""

from __future__ import annotations

import dataclasses
import gc
import weakref

import numpy as np
import pytest
import tensorflow as tf

from tests.unit.functions.descent import assert_trains, autodist, descend


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
