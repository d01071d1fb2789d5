"""Both branches: the replacement of an `If`, and the conditions that prevent the computation of both branches."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf

from autodist.graph.step import Step
from autodist.graph.step_editor import StepEditor
from autodist.kernels.normalise.both_branches import BothBranches, find_hindrance
from tests.unit.kernels.in_one_process import assert_same, capture, one_device, plan, train


def step_with(branches: Callable[[tf.Variable, tf.Tensor], object]) -> Step:
    """A step that updates a weight and then does something under a condition."""
    weight = tf.Variable(np.ones((4, 2)), name="weight")

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(x @ weight)
        weight.assign_sub(tape.gradient(loss, weight))
        branches(weight, x)
        return loss

    return capture(step, np.ones((4, 4))).step


def hindrance(branches: Callable[[tf.Variable, tf.Tensor], object]) -> str | None:
    step = step_with(branches)
    [node] = step.graph_index.of_op("If")
    return find_hindrance(node, step.graph_def.library)


def is_even(weight: tf.Variable) -> tf.Tensor:
    return tf.cast(weight[0, 0], tf.int64) % 2 == 0


@pytest.mark.parametrize(
    "write",
    [
        lambda v: v.assign(2.0 * v),
        lambda v: v.assign_add(v),
        lambda v: v.assign_sub(v),
        lambda v: v.scatter_add(tf.IndexedSlices(np.ones((1, 2)), [0])),
        lambda v: v.assign_add(tf.gather(v, [0, 1, 2, 3])),
        lambda v: tf.cond(v[0, 0] > 1.0, lambda: v.assign(v + 1.0), lambda: v.assign(v + 2.0)),
    ],
)
def test_nothing_keeps_writes_from_being_chosen(write):
    def branches(weight, _):
        tf.cond(is_even(weight), lambda: [write(weight)][:0], list)

    assert hindrance(branches) is None


@pytest.mark.parametrize(
    "act, op",
    [
        (lambda v, x: tf.print("here"), "PrintV2"),
        (lambda v, x: tf.debugging.assert_positive(x), "Assert"),
        (lambda v, x: tf.random.uniform([2]), "RandomUniform"),
        (lambda v, x: v.scatter_update(tf.IndexedSlices(np.ones((1, 2)), [0])), "ResourceScatterUpdate"),
        (lambda v, x: tf.cond(v[0, 0] > 1.0, lambda: [tf.print("far in")][:0], list), "PrintV2"),
    ],
)
def test_an_op_that_only_one_branch_may_run_is_named(act, op):
    def branches(weight, x):
        def then():
            act(weight, x)
            weight.assign(2.0 * weight)

        tf.cond(is_even(weight), lambda: [then()][:0], list)

    assert hindrance(branches).startswith(f"{op} (")


@pytest.mark.parametrize("cluster", [(1, 2), (2, 2)])
def test_a_value_whose_shape_depends_on_the_branch_is_chosen(cluster):
    weight, kept = tf.Variable(np.ones((4, 2)), name="weight"), tf.Variable(np.zeros(4), name="kept", trainable=False)
    steps = tf.Variable(0, name="steps", trainable=False)

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(x @ weight))
        weight.assign_sub(0.1 * tape.gradient(loss, weight))
        steps.assign_add(1)

        def keep():
            kept.assign(tf.reduce_mean(x, 0))
            return tf.concat([x, x], 1), tf.ones([2])

        chosen, ones = tf.cond(steps % 2 == 0, keep, lambda: (x, tf.ones([3])))
        return tf.reduce_mean(tf.reduce_sum(chosen, 1)), ones, kept + 0.0

    batches = [[np.random.default_rng(k).normal(size=(count, 4))] for k, count in enumerate((7, 4, 6, 9))]
    captured = capture(step, *batches[0])
    found = train(captured, plan(captured.step, *cluster), batches)
    assert_same(found, one_device(captured, tf.function(step, reduce_retracing=True), batches))


def test_each_variable_is_read_and_written_once():
    def branches(weight, _):
        def then():
            weight.assign(2.0 * weight)
            weight.assign_add(weight)
            weight.assign_sub(0.5 * weight)

        tf.cond(is_even(weight), lambda: [then()][:0], lambda: [weight.assign(-weight)][:0])

    step = step_with(branches)
    editor = StepEditor(step)
    [node] = step.graph_index.of_op("If")
    before = set(editor.names)
    taken = BothBranches(editor, step).take(node)
    made = [editor[name].op for name in editor.names if name not in before]
    assert made.count("ReadVariableOp") == made.count("AssignVariableOp") == made.count("SelectV2") == 1
    [writes] = taken.writes.values()
    assert [editor[w].op for w in writes] == ["AssignVariableOp"]
    assert not {"AssignAddVariableOp", "AssignSubVariableOp"} & set(made)
