"""Gradients that are gathered in one run and applied in another are told from those that are applied at once."""

from __future__ import annotations

import pytest
import tensorflow as tf

from autodist.capture.accumulation import find_accumulations, require_applied, require_means
from autodist.capture.gradients import noting_gradients
from autodist.capture.graph_mode import CapturedGraph
from autodist.errors import CaptureError

v1 = tf.compat.v1


def build(reduce=tf.reduce_mean, also_trains=False, gathers=True, sparse=False):
    """The graph, with a run that gathers ("gather") and one that applies ("apply")."""
    with tf.Graph().as_default() as graph, noting_gradients(in_functions=False) as notes:
        x = v1.placeholder(tf.float64, [None, 2], "x")
        weight = v1.get_variable("weight", [2, 1], tf.float64)
        rows = tf.gather(weight, tf.cast(x[:, 0], tf.int32)) if sparse else x @ weight
        loss = reduce(tf.square(rows))
        optimizer = v1.train.GradientDescentOptimizer(0.1)
        if gathers:
            kept = v1.get_variable("kept", [2, 1], tf.float64, trainable=False)
            [gradient] = tf.gradients(loss, weight)
            kept.assign_add(tf.convert_to_tensor(gradient), name="gather")
            optimizer.apply_gradients([(kept, weight)], name="apply")
        if also_trains:
            optimizer.minimize(loss, name="train")
    return CapturedGraph.of(graph, notes.calls)


@pytest.mark.parametrize("sparse", [False, True])
def test_a_graph_that_only_gathers_is_refused_with_the_idiom_and_the_mend(sparse):
    captured = build(sparse=sparse)
    with pytest.raises(
        CaptureError, match=r"gathers gradients.*of weight is kept in kept.*gradient_accumulation_steps="
    ):
        require_applied(captured, captured.whole())


def test_a_graph_without_any_gradient_is_told_so():
    captured = build(gathers=False)
    with pytest.raises(CaptureError, match="makes no gradient that is written to its variable"):
        require_applied(captured, captured.whole())


@pytest.mark.parametrize("gathers", [False, True])
def test_a_graph_that_trains_in_one_run_passes(gathers):
    captured = build(also_trains=True, gathers=gathers)
    require_applied(captured, captured.whole())


def test_a_run_that_trains_keeps_nothing():
    captured = build(also_trains=True)
    item = captured.step([], ["train"], {"x:0": 0})
    assert item.gradients and not find_accumulations(captured, item)


def test_a_run_that_gathers_is_found():
    captured = build(also_trains=True)
    [kept] = find_accumulations(captured, captured.step([], ["gather"], {"x:0": 0}))
    assert (kept.variable, kept.kept_in) == ("weight", "kept")
    assert not find_accumulations(captured, captured.step([], ["apply"], {}))


@pytest.mark.parametrize("reduce", [tf.reduce_sum, tf.nn.l2_loss, tf.reduce_max])
def test_gradients_of_other_than_means_cannot_be_kept(reduce):
    captured = build(reduce, also_trains=True)
    with pytest.raises(CaptureError, match=r"keeps the gradient of weight in kept.*not a mean over the examples"):
        require_means(captured, captured.step([], ["gather"], {"x:0": 0}))


@pytest.mark.parametrize("target", ["gather", "apply", "train"])
def test_gradients_of_means_can(target):
    captured = build(also_trains=True)
    require_means(captured, captured.step([], [target], {"x:0": 0} if target != "apply" else {}))
