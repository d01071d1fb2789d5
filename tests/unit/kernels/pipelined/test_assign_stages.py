"""The assignment of nodes to pipeline stages, and the rejected steps."""

from __future__ import annotations

import contextlib
import functools

import numpy as np
import pytest
import tensorflow as tf

from autodist.capture.gradients import recording_gradients
from autodist.capture.graph_mode import CapturedGraph
from autodist.capture.stage_marks import StageMark
from autodist.errors import StrategyError
from autodist.kernels import Context, Fetching, rewrite
from tests.unit.kernels.in_one_process import Session, assert_same, capture, one_device, train
from tests.unit.kernels.pipelined.models import pipelined
from tests.unit.kernels.whole_sum_steps import gathered


def variables(count):
    return [tf.Variable(np.eye(3) * (k + 1), name=f"v{k}") for k in range(count)]


def rewrite_for_both(step, stage_of):
    captured = capture(step, np.ones((2, 3)))
    strategy = pipelined(captured.step, stage_of, 2, 2)
    return [rewrite(captured.step, Context(strategy, worker)) for worker in range(2)]


def trained(loss_of, kernels):
    def step(x):
        with tf.GradientTape() as tape:
            loss = loss_of(x)
        for kernel, gradient in zip(kernels, tape.gradient(loss, kernels), strict=True):
            kernel.assign_sub(gradient)
        return loss

    return step


def test_a_weight_that_is_normalised_before_its_use_holds_back_no_micro_batch():
    """A factor of its gradient depends only on the weight; it is multiplied by each micro-batch's result."""
    a, b = variables(2)
    step = trained(lambda x: tf.reduce_mean(tf.tanh(x @ tf.math.l2_normalize(a, 0)) @ tf.square(b)), [a, b])
    captured = capture(step, np.ones((5, 3)))
    batches = [[np.random.default_rng(k).normal(size=(5, 3))] for k in range(3)]
    assert_same(
        train(captured, pipelined(captured.step, {"v0": 0, "v1": 1}, 2, 2), batches),
        one_device(captured, step, batches),
    )


def test_a_way_that_goes_back_is_refused_by_the_node():
    a, b, c = variables(3)
    step = trained(lambda x: tf.reduce_mean(tf.matmul(tf.tanh(x @ a) @ b, c, name="last")), [a, b, c])
    with pytest.raises(StrategyError) as caught:
        rewrite_for_both(step, {"v0": 0, "v1": 1, "v2": 0})
    told = str(caught.value)
    assert "v2 is in pipeline stage 0, but its reader last (MatMul) needs matmul_1 of stage 1" in told
    assert "data would flow back" in told


def test_a_table_that_rows_of_a_later_stage_are_gathered_from_is_refused():
    a, table = variables(2)
    step = trained(
        lambda x: (
            tf.reduce_mean(tf.gather(table, tf.cast(tf.reduce_sum(tf.tanh(x @ a), 1) > 0.0, tf.int32)))
            + 0.0 * tf.reduce_mean(x @ a)
        ),
        [a, table],
    )
    with pytest.raises(StrategyError, match="data would flow back"):
        rewrite_for_both(step, {"v0": 1, "v1": 0})


def test_two_groups_of_gradients_are_refused():
    a, b = variables(2)

    def step(x):
        for kernel in (a, b):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.tanh(x @ a) @ b)
            kernel.assign_sub(tape.gradient(loss, kernel))
        return loss

    with pytest.raises(StrategyError, match="differentiates 2 times"):
        rewrite_for_both(step, {"v0": 0, "v1": 1})


def test_ops_over_all_examples_are_refused():
    a, b = variables(2)
    step = trained(lambda x: tf.math.reduce_std(gathered(tf.tanh(x @ a) @ b)), [a, b])
    with pytest.raises(StrategyError, match="gathers over all examples.*processes micro-batches one after"):
        rewrite_for_both(step, {"v0": 0, "v1": 1})


def test_one_operation_on_variables_of_two_stages_is_refused():
    a, b = variables(2)

    def loss_of(x):
        return tf.reduce_mean(tf.while_loop(lambda k, _: k < 2, lambda k, h: (k + 1, tf.tanh(h @ a) @ b), (0, x))[1])

    with pytest.raises(StrategyError, match="v0.*v1.*different pipeline stages|data would flow back"):
        rewrite_for_both(trained(loss_of, [a, b]), {"v0": 0, "v1": 1})


def test_a_weights_gradient_is_computed_where_the_weight_is():
    a, b = variables(2)
    first, last = rewrite_for_both(trained(lambda x: tf.reduce_mean(tf.tanh(x @ a) @ b), [a, b]), {"v0": 0, "v1": 1})
    assert len(first.graph_index.of_op("MatMul")) == 2 * 2  # forward, and the gradient of v0
    assert len(last.graph_index.of_op("MatMul")) == 2 * 3  # forward, the gradient of v1 and that of its input


def test_values_marked_with_a_stage_are_computed_there_with_the_same_bits():
    a, b = variables(2)

    def loss_of(x, marking):
        with marking(0):
            h, shift = tf.tanh(x @ a), tf.floor(x)
        with marking(1):
            h = tf.nn.relu(h)
        return tf.reduce_mean(tf.exp(h @ b) + shift)

    ends = {}
    for marking in (StageMark, lambda stage: contextlib.nullcontext()):
        step = trained(functools.partial(loss_of, marking=marking), [a, b])
        given = [[np.random.default_rng(0).normal(size=(5, 3))]]
        captured = capture(step, *given[0])
        session = Session(captured, pipelined(captured.step, {"v0": 0, "v1": 1}, 2, 2))
        ends[marking] = session.train(given)
        where = [
            {op: len(step.graph_index.of_op(op)) for op in ("Tanh", "Relu", "Floor", "Exp")} for step in session.steps
        ]
        early = 0 if marking is StageMark else 2
        assert where[0] == {"Tanh": 2, "Relu": early, "Floor": 2 - early, "Exp": 0}
        assert where[1]["Relu"] == 2 - early
    marked, plain = ends.values()
    for name in ("v0", "v1"):
        np.testing.assert_array_equal(marked.variable(name), plain.variable(name))


@pytest.mark.parametrize(
    ("marks", "stage_of", "told"),
    [
        ((1, 0), {"v0": 1, "v1": 1}, r"is created in ad.stage\(0\), but needs .* of stage 1: data would flow back"),
        ((0, 2), {"v0": 0, "v1": 1}, r"is created in ad.stage\(2\), but the pipeline has 2 stages"),
        ((1, 1), {"v0": 0, "v1": 1}, r"is created in ad.stage\(1\), but uses v0, which is in pipeline stage 0"),
        ((0, 0), {"v0": 0, "v1": 1}, r"is created in ad.stage\(0\), but needs .* \(v1\) of stage 1"),
    ],
)
def test_values_marked_with_an_impossible_stage_are_refused(marks, stage_of, told):
    a, b = variables(2)

    def loss_of(x):
        with StageMark(marks[0]):
            h = tf.tanh(x @ a)
        with StageMark(marks[1]):
            return tf.reduce_mean(h @ b)

    with pytest.raises(StrategyError, match=told):
        rewrite_for_both(trained(loss_of, [a, b]), stage_of)


def turned(x, kernel):
    return tf.compat.v1.while_loop(lambda k, h: k < 2, lambda k, h: (k + 1, tf.tanh(h @ kernel)), [0, x])[1]


def chosen(x, kernel):
    return tf.compat.v1.cond(tf.reduce_sum(x) > 0.0, lambda: tf.tanh(x @ kernel), lambda: x @ kernel)


def rewrite_graph_of(inner):
    v1 = tf.compat.v1
    with tf.Graph().as_default() as graph, recording_gradients(in_functions=False) as notes:
        x = v1.placeholder(tf.float64, [None, 3], "x")
        kernels = [v1.get_variable(f"v{k}", initializer=np.eye(3), use_resource=True) for k in range(2)]
        loss = tf.reduce_mean(tf.tanh(inner(x, kernels[0]) @ kernels[1]))
        v1.train.GradientDescentOptimizer(0.1).minimize(loss, name="train")
    captured = CapturedGraph.of(graph, notes.calls)
    strategy = pipelined(captured.whole(), {"v0": 0, "v1": 1}, 2, 2)
    context = Context(strategy, 0, Fetching.BY_ALL)
    rewrite(captured.step([], ["train"], {"x:0": 0}), context)


@pytest.mark.parametrize("inner", [turned, chosen])
def test_control_flow_that_is_one_operation_is_computed_in_a_stage(inner):
    rewrite_graph_of(inner)


@pytest.mark.usefixtures("first_control_flow")
@pytest.mark.parametrize("inner", [turned, chosen])
def test_control_flow_of_tensorflow_1_is_refused_in_stages_with_what_makes_it_one_operation(inner):
    with pytest.raises(StrategyError, match="of TensorFlow 1 cannot be computed in stages. Call .*control_flow_v2"):
        rewrite_graph_of(inner)
