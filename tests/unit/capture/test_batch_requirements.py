"""Steps that fit one batch size are distinguished from those that fit any; no runnable step is rejected."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import tensorflow as tf

from autodist.capture.batch_requirements import BatchDivision, require_any_length
from autodist.capture.function import capture_function
from autodist.errors import CaptureError

WEIGHT = tf.Variable(np.ones((4, 3)), name="weight", dtype=tf.float32)
STATE = tf.Variable(np.zeros((8, 3)), name="state", dtype=tf.float32, trainable=False)
EIGHT = tf.constant(np.arange(32).reshape(8, 4), tf.float32)
SPECS = (tf.TensorSpec([None, 4]), tf.TensorSpec([None, 3]))


@cache  # for all ways to deal the examples out
def item_of(change=lambda x: x, after=lambda y: y, loss_of=lambda e: tf.reduce_mean(tf.square(e)), axes=(0, 0)):
    """Returns a step that multiplies `change(x)` by a weight and compares `after` of that with the labels."""

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(after(change(x) @ WEIGHT) - y)
        WEIGHT.assign_sub(0.1 * tape.gradient(loss, WEIGHT))
        return loss

    return capture_function(step, SPECS, axes).step


def set_shape(x):
    x.set_shape([8, 4])
    return x


def with_state(y):
    STATE.assign(STATE + y)
    return y + STATE


@cache
def tables():
    """One with a scalar for each key, and one with a vector."""
    with tf.init_scope():
        numbers = tf.range(9, dtype=tf.int64)
        content = tf.lookup.KeyValueTensorInitializer(numbers, numbers)
        vectors = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, tf.zeros([2]))
        vectors.insert(numbers, tf.zeros([9, 2]))
        return tf.lookup.StaticHashTable(content, 0), vectors


def looked_up(x, which=0):
    return tables()[which].lookup(tf.cast(x, tf.int64))


BOUND = {
    "reshape": lambda x: tf.reshape(x, [8, -1]),
    "set_shape": set_shape,
    "ensure_shape": lambda x: tf.ensure_shape(x, [8, 4]),
    "zeros of its shape": lambda x: x + tf.zeros([8, 4]),
    "constant rows": lambda x: x + EIGHT,
    "loop": lambda x: tf.while_loop(lambda k, _: k < 2, lambda k, s: (k + 1, s + x), (0, EIGHT))[1],
}
FREE = {
    "of a table": lambda x: tf.cast(looked_up(x), tf.float32) + tf.zeros_like(x),
    "vectors of a table": lambda x: tf.reduce_sum(looked_up(x, 1) + tf.zeros([4, 2]), -1),
    "as it is": lambda x: x,
    "reshape": lambda x: tf.reshape(x, [-1, 4]),
    "by its shape": lambda x: x + tf.zeros([tf.shape(x)[0], 4]),
    "one row": lambda x: x + EIGHT[:1],
    "pairs": lambda x: tf.reshape(tf.reshape(x, [-1, 2, 4])[:, ::-1], [-1, 4]),
    "unknown op": lambda x: tf.reverse(x, [0]),
}


@pytest.mark.parametrize("name", BOUND)
@pytest.mark.parametrize("shares", [2, 3, 8, 16])
def test_a_step_for_one_number_of_examples_is_refused_where_replicas_get_fewer(name, shares):
    with pytest.raises(CaptureError, match=r"takes 8 examples at a time.*\(x, y\).*Leave the batch axis open"):
        require_any_length(item_of(BOUND[name]), BatchDivision(8, shares, shares))


def test_a_constant_of_the_batch_size_beside_rows_behind_a_lookup_table_is_refused():
    def beside_constant(x):
        return tf.concat([tf.gather(EIGHT, looked_up(x)[:, 0])[:, :2], tf.zeros([8, 2])], 1)

    step = item_of(beside_constant, tf.reduce_mean)  # nothing else shows how many examples there are
    with pytest.raises(CaptureError, match="takes 8 examples at a time.*With 4"):
        require_any_length(step, BatchDivision(8, 2, 2))


@pytest.mark.parametrize("name", BOUND)
@pytest.mark.parametrize(
    "dealt",
    [
        BatchDivision(8, 1, 1),
        BatchDivision(8, 1, 2),
        BatchDivision(8, 0, 2),
        BatchDivision(16, 2, 2),
        BatchDivision(0, 2, 2),
    ],
)
def test_it_goes_on_where_each_replica_gets_just_that_number(name, dealt):
    require_any_length(item_of(BOUND[name]), dealt)


@pytest.mark.parametrize("name", FREE)
@pytest.mark.parametrize("shares", [2, 4])
def test_a_step_for_any_number_of_examples_goes_on(name, shares):
    require_any_length(item_of(FREE[name]), BatchDivision(8, shares, shares))


def test_one_example_among_more_replicas_goes_on():
    """The replicas that have none get a row that does not count."""
    require_any_length(item_of(lambda x: tf.reshape(x, [1, 4])), BatchDivision(1, 2, 2))


def test_an_input_that_is_not_split_may_have_any_fixed_length():
    step = item_of(BOUND["reshape"], after=tf.reduce_mean, axes=(None, 0))
    require_any_length(step, BatchDivision(8, 2, 2))


def test_the_sum_over_a_stated_batch_goes_on():
    require_any_length(item_of(loss_of=lambda e: tf.reduce_sum(tf.square(e)) / 8), BatchDivision(8, 2, 2))


def test_the_tensor_is_named_and_what_the_script_calls_an_input():
    names = {"x:0": "features", "y:0": "labels"}
    with pytest.raises(CaptureError, match=r"\(features, labels\).*features has the fixed shape \(8, 4\)"):
        require_any_length(item_of(set_shape), BatchDivision(8, 2, 2, names))
    with pytest.raises(CaptureError, match=r"EnsureShape:0 has the fixed shape \(8, 4\)"):
        require_any_length(item_of(BOUND["ensure_shape"]), BatchDivision(8, 2, 2, names))


def test_a_variable_with_a_row_for_each_example_is_named():
    step = item_of(after=with_state)
    with pytest.raises(CaptureError, match=r"takes 8 examples.*state \[8, 3\] hold a row for each of them"):
        require_any_length(step, BatchDivision(8, 2, 2))
    with pytest.raises(CaptureError, match=r"state \[8, 3\] hold a row for each.*2 replicas has other examples"):
        require_any_length(step, BatchDivision(8, 1, 2))
    require_any_length(step, BatchDivision(8, 1, 1))


def test_a_variable_that_happens_to_have_as_many_rows_goes_on():
    def counted(y):
        STATE.assign_add(tf.ones([8, 3]) * tf.reduce_max(y))
        return y

    require_any_length(item_of(after=counted), BatchDivision(8, 1, 2))


def test_slots_of_as_many_rows_as_there_are_examples_are_no_rows_of_examples():
    weight, slot = tf.Variable(np.ones((8, 3))), tf.Variable(np.zeros((8, 3)), trainable=False)

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.reshape(x, [8, 8]) @ weight))
        slot.assign(0.9 * slot + tape.gradient(loss, weight))
        weight.assign_sub(slot)

    item = capture_function(step, (tf.TensorSpec([None, 8], tf.float64),), (0,)).step
    require_any_length(item, BatchDivision(8, 1, 2))
