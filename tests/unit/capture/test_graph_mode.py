"""TensorFlow 1 graphs: the targets of a session run become a step."""

from __future__ import annotations

import pytest
import tensorflow as tf

from autodist.capture.gradients import recording_gradients
from autodist.capture.graph_mode import CapturedGraph
from autodist.errors import CaptureError
from autodist.kernels import only_sets

v1 = tf.compat.v1


@pytest.fixture
def built():
    """A graph that trains one weight, with the notes made of it."""
    with tf.Graph().as_default() as graph, recording_gradients(in_functions=False) as notes:
        x = v1.placeholder(tf.float32, [None, 2], "x")
        weight = v1.get_variable("weight", [2, 1])
        loss = tf.reduce_mean(tf.square(x @ weight), name="loss")
        v1.train.MomentumOptimizer(0.1, 0.9).minimize(loss, name="train")
        tf.identity(x @ weight, name="predicted")
        v1.global_variables_initializer()
        yield graph, notes


def test_a_training_step_has_the_gradient_and_keeps_the_loss_for_its_weight(built):
    graph, notes = built
    step = CapturedGraph.of(graph, notes.calls).step([], ["train"], {"x:0": 0})
    assert [g.variable for g in step.gradients] == ["weight"]
    assert step.gradient_calls[0].targets == ("loss:0",)
    assert {v.name for v in step.variables} == {"weight", "weight/Momentum"}


def test_a_prediction_has_no_gradient_and_only_what_it_needs(built):
    graph, notes = built
    step = CapturedGraph.of(graph, notes.calls).step(["predicted:0"], [], {"x:0": 0})
    assert not step.gradients
    assert {v.name for v in step.variables} == {"weight"}
    assert not only_sets(step)


def test_initialisers_only_set(built):
    graph, notes = built
    assert only_sets(CapturedGraph.of(graph, notes.calls).step([], ["init"], {}))


def test_any_tensor_may_be_fed(built):
    graph, notes = built
    step = CapturedGraph.of(graph, notes.calls).step(["predicted:0"], [], {"predicted:0": 0})
    assert [node.op for node in step.graph_def.node] == ["Placeholder"]


def test_nodes_added_later_may_report_but_not_train(built):
    graph, notes = built
    captured = CapturedGraph.of(graph, notes.calls)
    with graph.as_default():
        tf.constant(1.0, name="report")
        captured.require_same_training(notes.calls)
        v1.get_variable("late", [1])
    with pytest.raises(CaptureError, match="late was added"):
        captured.require_same_training(notes.calls)


@pytest.mark.feature("session", "step: two graphs in one scope", refused="CaptureError")
def test_two_graphs_in_one_scope_are_refused(built):
    _, notes = built
    with tf.Graph().as_default() as other:
        weight = v1.get_variable("weight", [1])
        v1.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_sum(weight))
        with pytest.raises(CaptureError, match="two graphs"):
            CapturedGraph.of(other, notes.calls)


@pytest.mark.feature("session", "model: reference variables (`use_resource=False`)", refused="CaptureError")
def test_reference_variables_are_refused_with_the_mend():
    with tf.Graph().as_default() as graph:
        v1.get_variable("old", [1], use_resource=False)
        with pytest.raises(CaptureError, match="enable_resource_variables"):
            CapturedGraph.of(graph, [])


def test_tasks_of_a_cluster_that_the_script_names_are_none_of_the_run():
    with tf.Graph().as_default() as graph, recording_gradients(in_functions=False) as notes:
        with v1.device(v1.train.replica_device_setter(1, worker_device="/job:worker/task:1/cpu:0")):
            x = v1.placeholder(tf.float32, [None, 2], "x")
            weight = v1.get_variable("weight", [2, 1])
            turned = tf.while_loop(lambda k, _: k < 2, lambda k, y: (k + 1, y + x @ weight), (0, x @ weight))[1]
            v1.train.AdamOptimizer(0.1).minimize(tf.reduce_mean(tf.square(turned)), name="train")
        definition = CapturedGraph.of(graph, notes.calls).step([], ["train"], {"x:0": 0}).graph_def
    bodies = [node for function in definition.library.function for node in function.node_def]
    assert {node.device for node in [*definition.node, *bodies]} <= {"", "/device:CPU:0"} and bodies
