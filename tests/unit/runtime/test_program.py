"""A program runs a step, and releases the memory used to create it."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import tensorflow as tf

from autodist.errors import UnevenBatchError
from autodist.graph.names import node_of
from autodist.graph.parts import EvenSharesRequired, VariableGradient
from autodist.graph.step import EXAMPLES, UNEVEN, CapturedStep
from autodist.runtime import program as module
from autodist.runtime.graph_runner import GraphRunners
from autodist.runtime.program import Program
from autodist.runtime.updates import Updates
from tests.unit.graph.replicated import replicated


@pytest.fixture
def graph_runners():
    made = GraphRunners("", tf.compat.v1.ConfigProto())
    yield made
    made.close(60)


@pytest.mark.parametrize(("trains", "times"), [(True, 1), (False, 0)])
def test_memory_is_given_back_before_and_after_the_first_run_of_a_step_that_trains(
    graph_runners, monkeypatch, trains, times
):
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [2], name="x")
        tf.identity(x + 1.0, name="y")
    gradients = (VariableGradient("v", ("y:0",), 0),) if trains else ()
    item = CapturedStep(graph.as_graph_def(), gradients=gradients, inputs={"x:0": None}, outputs=("y:0",))
    given_back = []
    monkeypatch.setattr(module, "collect_and_trim", lambda: given_back.append("before"))
    monkeypatch.setattr(module, "trim_heaps", lambda: given_back.append("after"))
    step = Program(graph_runners, item, ["x:0"], Updates(lambda failure: failure))
    assert given_back == ["before"] * times  # before the variables get their values
    for _ in range(3):
        np.testing.assert_array_equal(step.run([np.ones(2, np.float32)], 1)[0], [2.0, 2.0])
        assert given_back == ["before", "after"] * times


@pytest.mark.parametrize(("is_own", "among"), [(False, 6), (True, 2)])
def test_different_numbers_of_examples_stop_a_run_with_the_reason(graph_runners, is_own, among):
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [2], name="x")
        tf.identity(x, name="y")
        check = tf.debugging.Assert(tf.reduce_all(x > 0), [UNEVEN, tf.constant(6, tf.int64)])
    even = EvenSharesRequired("loss:0", "node 'det' (MatrixDeterminant): why", 6, 2, is_own)
    item = CapturedStep(
        graph.as_graph_def(),
        inputs={"x:0": None},
        outputs=("y:0",),
        targets=(check.name,),
        even_parts=even,
    )
    step = Program(graph_runners, item, ["x:0"], Updates(lambda failure: failure))
    step.require_fits(4, 0)
    step.run([np.ones(2, np.float32)], 4)
    told = f"6 examples for {among} replicas, and not equally many.*loss:0.*Determinant.* multiple of {among}"
    with pytest.raises(UnevenBatchError, match=told):
        step.run([np.zeros(2, np.float32)], 4)
    with pytest.raises(UnevenBatchError, match=r"a batch of 3 examples .* among 2 replicas"):
        step.require_fits(3, 0)


@pytest.mark.parametrize("copies", [{"y": (0, "y")}, {}])
def test_a_reshape_of_a_part_of_a_group_is_explained_if_there_are_several_replicas(graph_runners, copies):
    """With one replica, it is an error of the script that has nothing to do with replicas."""
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [None], name="x")
        examples = tf.compat.v1.placeholder(tf.int64, [], name=node_of(EXAMPLES))
        tf.multiply(tf.reduce_mean(tf.reshape(x, [-1, 2])), tf.cast(examples, tf.float32), name="y")
    item = replicated(graph.as_graph_def(), inputs={"x:0": 0}, outputs=("y:0",), copies=copies)
    step = Program(graph_runners, item, ["x:0"], Updates(lambda failure: failure))
    step.run([np.ones(4, np.float32)], 4)
    with pytest.raises(tf.errors.InvalidArgumentError, match="requires a multiple of 2") as raised:
        step.run([np.ones(3, np.float32)], 3)
    notes = "".join(getattr(raised.value, "__notes__", ()))
    assert ("each replica needs whole groups" in notes) == bool(copies)


def test_a_step_that_needs_even_parts_leaves_other_failures_as_they_are(graph_runners):
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [2], name="x")
        tf.debugging.check_numerics(x, "not finite", name="y")
    even = EvenSharesRequired("loss:0", "why", 2, 2)
    item = replicated(graph.as_graph_def(), inputs={"x:0": None}, outputs=("y:0",), even_parts=even)
    step = Program(graph_runners, item, ["x:0"], Updates(lambda failure: failure))
    with pytest.raises(tf.errors.InvalidArgumentError, match="not finite"):
        step.run([np.full(2, np.nan, np.float32)], 2)


def test_lines_of_tensorflow_are_hidden_when_repeated_steps_are_prepared(graph_runners, monkeypatch):
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [None], name="x")
        tf.reduce_sum(x, name="y")
    item = CapturedStep(graph.as_graph_def(), inputs={"x:0": 0}, outputs=("y:0",))
    step = Program(graph_runners, item, ["x:0"], Updates(lambda failure: failure))
    hidden = []
    monkeypatch.setattr(module, "quiet_tensorflow", lambda when: hidden.append(when) or contextlib.nullcontext())
    for count in (2, 2, 3):
        assert step.repeat([[np.ones(4, np.float32)]] * count, 4) == [4.0]
    assert hidden == [True, False, True]
