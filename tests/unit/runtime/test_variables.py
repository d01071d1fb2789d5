"""VariableTracker: values left by a step are pulled when Python reads them, and Python's writes are marked."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from autodist.runtime.eager_watch import unwatched
from autodist.runtime.variables import LARGE, VariableTracker


class Session:
    """Stands for the session: it has other values than the script's objects."""

    def __init__(self):
        self.values = {}
        self.pulls = 0
        self.tracker = VariableTracker(self.pull, 1)

    def track(self, variable, value):
        tracked = self.tracker.track(variable)
        tracked.is_ahead = False
        self.values[tracked] = value
        return tracked

    def step(self):
        """A step writes all variables."""
        for tracked in self.values:
            tracked.is_behind = True

    def pull(self, read):
        self.pulls += 1
        for tracked, value in self.values.items():
            tracked.write(value)
            tracked.is_behind = False


@pytest.fixture
def session():
    made = Session()
    yield made
    made.tracker.forget()


@pytest.fixture
def variable():
    return tf.Variable([1.0, 2.0])


NEW = [5.0, 6.0]


def test_a_variable_is_tracked_once(session, variable):
    first = session.tracker.track(variable)
    assert session.tracker.track(variable) is first
    assert first.is_ahead and not first.is_behind
    assert list(session.tracker) == [first]


def test_shared_names_differ_though_names_do_not(session):
    first, second = (session.tracker.track(tf.Variable(0.0)) for _ in range(2))
    assert first.shared_name != second.shared_name


def test_reading_twice_pulls_once(session, variable):
    session.track(variable, NEW)
    session.step()
    assert [list(variable.numpy()) for _ in range(2)] == [NEW, NEW]
    assert session.pulls == 1


def test_reading_what_is_up_to_date_pulls_nothing(session, variable):
    session.track(variable, NEW)
    np.testing.assert_array_equal(variable.numpy(), [1.0, 2.0])
    assert session.pulls == 0


def test_variables_that_others_may_write_are_read_each_time_unless_python_assigned_them(session, variable):
    tracked = session.track(variable, NEW)
    tracked.is_asynchronous = True
    np.testing.assert_array_equal(variable.numpy(), NEW)
    session.values[tracked] = [8.0, 9.0]
    np.testing.assert_array_equal(variable.numpy(), [8.0, 9.0])
    variable.assign([7.0, 8.0])
    assert not tracked.may_be_behind
    np.testing.assert_array_equal(variable.numpy(), [7.0, 8.0])


def test_an_assignment_is_ahead_and_asks_for_nothing(session, variable):
    tracked = session.track(variable, NEW)
    session.step()
    variable.assign([7.0, 8.0])
    assert tracked.is_ahead and not tracked.is_behind and session.pulls == 0
    np.testing.assert_array_equal(variable.numpy(), [7.0, 8.0])


def test_assignments_by_keras_are_noticed(session):
    variable = keras.Variable([1.0, 2.0])
    tracked = session.track(variable.value, NEW)
    session.step()
    np.testing.assert_array_equal(variable.numpy(), NEW)
    variable.assign([0.0, 1.0])
    assert tracked.is_ahead


def test_building_a_graph_pulls_nothing(session, variable):
    session.track(variable, NEW)
    session.step()
    with tf.Graph().as_default():
        tf.constant(1.0)
    tf.function(lambda x: x * variable).get_concrete_function(tf.constant(1.0))
    assert session.pulls == 0


def test_forgotten_variables_are_plain_again(session, variable):
    session.track(variable, NEW)
    session.step()
    session.tracker.forget()
    np.testing.assert_array_equal(variable.numpy(), [1.0, 2.0])
    np.testing.assert_array_equal(tf.function(lambda: variable * 1.0)(), [1.0, 2.0])
    assert session.pulls == 0 and list(session.tracker) == []


@pytest.mark.parametrize("make", [tf.Variable, keras.Variable])
def test_a_value_is_assigned_where_that_of_a_step_was_not_read(session, make):
    variable = make(np.ones(LARGE, np.float32))
    tracked = session.track(variable.value if make is keras.Variable else variable, np.zeros(LARGE, np.float32))
    tracked.hand_over(is_same=True)
    variable.assign(np.full(LARGE, 3.0, np.float32))
    assert tracked.is_ahead and float(tf.reduce_sum(variable)) == 3.0 * LARGE and session.pulls == 0
    tracked.hand_over(is_same=True)
    with pytest.raises(ValueError, match="shape"):
        variable.assign(np.ones(3, np.float32))


@pytest.mark.parametrize("is_same", [True, False])
def test_of_a_large_value_the_session_alone_keeps_a_copy(session, is_same):
    large, small = tf.Variable(np.ones(LARGE // 4, np.float32)), tf.Variable([1.0])
    for variable in (large, small):
        session.track(variable, np.full(variable.shape, 2.0, np.float32)).hand_over(is_same=is_same)
    with unwatched():
        assert tf.raw_ops.VariableShape(input=large.handle).numpy() == [0]
        assert tf.raw_ops.VariableShape(input=small.handle).numpy() == [1]
    np.testing.assert_array_equal(small.numpy(), [1.0 if is_same else 2.0])
    np.testing.assert_array_equal(large.numpy(), np.full(LARGE // 4, 2.0))


def test_generators_go_on_as_soon_as_a_step_has_them():
    def tracked(tracker, values):
        found = [tf.Variable(v, name="layer/seed_generator_state", dtype=tf.int64) for v in values]
        for variable in found:
            tracker.track(variable, is_seed=True)
        return found

    first = VariableTracker(lambda read: None, 1)
    tracked(first, ([1, 2], [3, 4]))
    first.track(tf.Variable(1.0, name="layer/kernel"))
    states = {name: np.asarray(one.read()) for name, one in first.generators.items()}
    assert list(states) == ["layer/seed_generator_state#0", "layer/seed_generator_state#1"]
    second = VariableTracker(lambda read: None, 1)
    here = tracked(second, ([5, 6],))
    second.resume(states)
    later = tracked(second, ([7, 8], [9, 9]))
    assert [v.numpy().tolist() for v in (*here, *later)] == [[1, 2], [3, 4], [9, 9]]
    later[0].assign([0, 0])
    tracked(second, ([1, 1],))
    assert later[0].numpy().tolist() == [0, 0], "once, and not again"


def test_only_what_python_has_just_set_to_zero_is_alike_on_all_workers(session):
    reset, other, untouched = (tf.Variable([1.0, 2.0]) for _ in range(3))
    tracked = [session.track(one, NEW) for one in (reset, other, untouched)]
    reset.assign([0.0, 0.0])
    other.assign([0.0, 1.0])
    session.tracker.mark_reset([reset, other, untouched, tf.Variable(0.0)])
    assert [one.is_alike for one in tracked] == [True, False, False]
    tracked[0].hand_over(is_same=True)
    assert not tracked[0].is_alike


def test_a_later_assignment_may_differ_between_workers(session, variable):
    tracked = session.track(variable, NEW)
    variable.assign([0.0, 0.0])
    session.tracker.mark_reset([variable])
    variable.assign([0.0, 0.0])
    assert tracked.is_ahead and not tracked.is_alike


def test_variables_that_another_program_has_written_are_pulled_when_read_and_at_once_where_that_is_not_observed(
    session, variable
):
    aliased, assigned = tf.Variable([0.0]), tf.Variable([0.0])
    data = tf.data.Dataset.range(1).map(lambda _: aliased.read_value())  # reads it unobserved
    session.track(variable, [3.0, 4.0])
    session.track(aliased, [5.0])
    session.tracker.track(assigned).is_ahead = False
    assigned.assign([7.0])
    session.tracker.fall_behind()
    assert session.pulls == 1
    assert next(iter(data)).numpy().tolist() == [5.0]
    assert (variable.numpy().tolist(), assigned.numpy().tolist()) == ([3.0, 4.0], [7.0])
