"""Kinds through calls, branches and loops, those of TensorFlow 1 too."""

from __future__ import annotations

import pytest
import tensorflow as tf

from autodist.graph.propagation import Mean, PerExample, Scalar, Sum, Unknown
from tests.unit.graph.propagation_batches import MEAN, SIZES, check, tensor


def test_conditions_and_calls(case, feeds):
    x = tensor(case, "x")
    flag = tf.compat.v1.placeholder_with_default(True, [], name="flag")

    @tf.function
    def inner(value):
        return value @ tf.ones([3, 1], tf.float64), tf.reduce_sum(value)

    rows, total = inner(x)
    check(
        case,
        feeds,
        [
            (rows, PerExample(0)),
            (total, Sum()),
            (tf.cond(flag, lambda: tf.reduce_mean(x), lambda: tf.reduce_mean(x * 2)), MEAN),
            (tf.cond(flag, lambda: x, lambda: x * 2), PerExample(0)),
        ],
    )
    chosen = tf.cond(tf.reduce_all(x > 0), lambda: x, lambda: x * 2)
    assert case.kind(chosen) == PerExample(0)
    assert case.kind(chosen).mixed_at is not None


def test_loops_keep_rows(case, feeds):
    x, s = tensor(case, "x"), tensor(case, "s")
    _, grown = tf.while_loop(lambda i, v: i < 3, lambda i, v: (i + 1, tf.tanh(v) * 2), [0, x])
    scanned = tf.scan(lambda carry, now: carry * 0.5 + now, tf.transpose(s, [1, 0, 2]))
    _, loss = tf.while_loop(
        lambda i, v: i < tf.shape(s)[1],
        lambda i, v: (i + 1, v + tf.reduce_mean(s[:, i])),
        [0, tf.constant(0, tf.float64)],
    )
    check(case, feeds, [(grown, PerExample(0)), (scanned, PerExample(1)), (loss, MEAN)])


@pytest.fixture
def old_control_flow():
    """Loops and conditions as graphs had them before they were functions; scripts for TensorFlow 1 still do."""
    tf.compat.v1.disable_control_flow_v2()
    yield
    tf.compat.v1.enable_control_flow_v2()


@pytest.mark.usefixtures("old_control_flow")
def test_old_loops_keep_rows(case, feeds):
    x, s = tensor(case, "x"), tensor(case, "s")
    flag = tf.compat.v1.placeholder_with_default(True, [], name="flag")
    _, grown = tf.while_loop(lambda i, v: i < 3, lambda i, v: (i + 1, tf.tanh(v) * 2), [0, x])
    scanned = tf.scan(lambda carry, now: carry * 0.5 + now, tf.transpose(s, [1, 0, 2]))
    chosen = tf.cond(flag, lambda: x, lambda: x * 2)
    check(case, feeds, [(grown, PerExample(0)), (scanned, PerExample(1)), (chosen, PerExample(0))])
    assert {"NextIteration", "Merge", "TensorArrayV3"} <= {op.type for op in case.graph.get_operations()}


@pytest.mark.usefixtures("old_control_flow")
def test_old_loops_that_turn_rows_into_something_else_are_unknown(case):
    x, s = tensor(case, "x"), tensor(case, "s")
    _, mixed = tf.while_loop(lambda i, v: i < 3, lambda i, v: (i + 1, v + tf.cumsum(s, 0)), [0, s])
    start = [0, tf.constant(1, tf.float64), tf.constant(1, tf.float64)]
    _, _, ratio = tf.while_loop(lambda i, v, r: i < 3, lambda i, v, r: (i + 1, tf.reduce_sum(s[:, i]), v), start)
    assert isinstance(case.kind(ratio), Unknown)
    [grown] = tf.while_loop(lambda v: tf.reduce_max(v) < 100, lambda v: (v * 2,), [x])
    assert isinstance(case.kind(mixed), Unknown)
    assert isinstance(case.kind(grown), Unknown)


def test_names_inside_functions_are_not_those_outside(case, feeds):
    """A sum in a function and one outside may have one name: they must not cancel."""
    x, s = tensor(case, "x"), tensor(case, "s")
    outside = tf.reduce_sum(x)

    @tf.function
    def inner(value, divisor):
        return tf.reduce_sum(value) / divisor, tf.reduce_sum(value[:, 0])

    ratio, total = inner(s, outside)
    kinds = case.assert_joins([ratio / total, ratio, total], feeds, SIZES)
    assert isinstance(kinds[0], Unknown)
    assert isinstance(kinds[1], Unknown) or kinds[1] == Mean(Scalar(outside.name))
    assert kinds[2] == Sum()


def test_a_loop_that_runs_as_long_as_its_examples_ask_is_unknown(case):
    x = tensor(case, "x")
    [grown] = tf.while_loop(lambda v: tf.reduce_max(v) < 100, lambda v: (v * 2,), [x])
    assert "how often it runs" in case.kind(grown).reason
