"""Deferred values: an object without its value gets it when it is read, and another value when it is written."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import numpy as np
import pytest
import tensorflow as tf

from autodist.runtime import eager_watch
from autodist.runtime.deferred_values import defer, deferred
from autodist.runtime.eager_watch import unwatched
from autodist.runtime.variables import TrackedVariable, VariableTracker


class Later:
    """A variable of zeros, with a deferred value of ones."""

    def __init__(self) -> None:
        self.computed = 0
        self.variable = tf.Variable(np.zeros([3, 2]), name="later")
        self.tracker = VariableTracker(lambda read: None, 1)
        defer(self.variable, self._compute)

    def _compute(self) -> tf.Tensor:
        self.computed += 1
        return tf.ones([3, 2], tf.float64)

    @property
    def tracked(self) -> TrackedVariable:
        return self.tracker.track(self.variable)

    @property
    def held(self) -> np.ndarray:
        """The value that the object holds."""
        with unwatched():
            return np.array(tf.raw_ops.ReadVariableOp(resource=self.variable.handle, dtype=tf.float64))


@pytest.fixture
def later() -> Iterator[Later]:
    made = Later()
    yield made
    made.tracker.forget()


def test_a_variable_holds_no_value_until_it_is_read(later: Later) -> None:
    assert later.held.size == 0 and later.computed == 0
    assert later.variable.shape == [3, 2]
    np.testing.assert_array_equal(later.variable.numpy(), np.ones([3, 2]))
    np.testing.assert_array_equal(later.held, np.ones([3, 2]))
    assert later.computed == 1 and deferred(later.variable) is None


@pytest.mark.parametrize("is_tracked", [False, True])
def test_an_assigned_value_replaces_it(later: Later, is_tracked: bool) -> None:
    if is_tracked:
        assert later.tracked.is_ahead
    later.variable.assign(np.full([3, 2], 5.0))
    np.testing.assert_array_equal(later.tracked.read(), np.full([3, 2], 5.0))
    assert later.computed == 0


def test_a_part_is_assigned_to_the_computed_value(later: Later) -> None:
    later.variable[0, 0].assign(7.0)
    np.testing.assert_array_equal(later.variable, [[7, 1], [1, 1], [1, 1]])


def test_functions_and_additions_see_it(later: Later) -> None:
    later.variable.assign_add(np.ones([3, 2]))
    assert float(tf.function(lambda: tf.reduce_sum(later.variable))()) == 12.0


def test_a_data_set_that_captures_it_reads_it(later: Later) -> None:
    pairs = tf.data.Dataset.range(2).map(lambda k: tf.cast(k, tf.float64) * later.variable)
    np.testing.assert_array_equal([*pairs][1], np.ones([3, 2]))


def test_a_data_set_that_captured_the_variable_before_reads_it() -> None:
    variable = tf.Variable(np.zeros([2]))
    pairs = tf.data.Dataset.range(2).map(lambda k: tf.cast(k, tf.float64) * variable)
    defer(variable, lambda: tf.ones([2], tf.float64))
    np.testing.assert_array_equal([*pairs][1], [1, 1])


def test_the_tracker_reads_it_without_putting_it_into_the_object(later: Later) -> None:
    np.testing.assert_array_equal(later.tracked.read(), np.ones([3, 2]))
    assert later.held.size == 0


def test_the_session_has_it_once_it_is_handed_over(later: Later) -> None:
    later.tracked.hand_over(is_same=True)
    assert later.tracked.is_behind and deferred(later.variable) is None


def test_a_value_that_is_deferred_later_is_ahead_of_the_session(later: Later) -> None:
    later.tracked.hand_over(is_same=True)
    defer(later.variable, lambda: tf.fill([3, 2], tf.constant(9.0, tf.float64)))
    assert later.tracked.is_ahead and not later.tracked.is_behind
    np.testing.assert_array_equal(later.variable, np.full([3, 2], 9.0))


def test_a_dropped_variable_is_not_watched() -> None:
    gc.collect()  # variables of earlier tests
    before = len(eager_watch._watched)
    variable = tf.Variable([1.0])
    defer(variable, lambda: tf.constant([2.0]))
    assert len(eager_watch._watched) == before + 2
    del variable
    gc.collect()
    assert len(eager_watch._watched) == before
