"""`with ad.stage(k)`: nodes created within it are marked with the stage, wherever their function is called."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from autodist.capture.gradients import recording_gradients
from autodist.capture.graph_mode import CapturedGraph
from autodist.capture.stage_marks import StageMark
from autodist.graph.stage_marks import has_stage_marks, marked_stage
from tests.unit.kernels.in_one_process import capture


def marks(step, op):
    return [marked_stage(node) for node in step.graph_def.node if node.op == op]


def stages(step):
    return {v.name.removeprefix("sequential/"): v.stage for v in step.variables}


def trained_by(model):
    """A step that trains a model of Keras by plain gradient descent."""

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x))
        for variable, gradient in zip(model.weights, tape.gradient(loss, model.trainable_variables), strict=True):
            variable.value.assign_sub(gradient)
        return loss

    return capture(step, np.ones((2, 3), "float32")).step


@pytest.mark.parametrize("stage", [-1, 1.0, "1", True, None])
def test_an_invalid_stage_number_is_refused(stage):
    with pytest.raises(ValueError, match="number of a pipeline stage"):
        StageMark(stage)


def test_variables_and_operations_of_a_function_belong_to_the_innermost_stage():
    with StageMark(0):
        first = tf.Variable(np.eye(3), name="first")
        with StageMark(2):
            last = tf.Variable(np.eye(3), name="last")
        third = tf.Variable(np.eye(3), name="third")

    def step(x):
        with tf.GradientTape() as tape:
            with StageMark(0):
                x = tf.nn.relu(x @ first)
                with StageMark(1):
                    x = tf.nn.softplus(x)
                x = tf.tanh(x @ third)
            x = tf.exp(x)
            loss = tf.reduce_mean(x @ last)
        for variable, gradient in zip((first, last), tape.gradient(loss, (first, last)), strict=True):
            variable.assign_sub(gradient)
        return loss

    item = capture(step, np.ones((2, 3))).step
    assert stages(item) == {"first": 0, "last": 2, "third": 0}
    assert [marks(item, op) for op in ("Relu", "Softplus", "Tanh", "Exp")] == [[0], [1], [0], [None]]
    assert marks(item, "ReluGrad") == [None]
    assert has_stage_marks(item)


@pytest.mark.parametrize("form", ["made", "called", "built_late", "made_and_called"])
def test_a_layer_of_keras_computes_in_its_stage_whenever_it_is_called(form):
    keras.utils.clear_session(free_memory=False)

    def layers():
        return [keras.layers.Dense(3, name="a"), keras.layers.ReLU()], [keras.layers.Softmax(), keras.layers.Dense(2)]

    if form == "called":
        given = h = keras.Input((3,))
        for stage, group in enumerate(layers()):
            with StageMark(stage):
                for layer in group:
                    h = layer(h)
        model = keras.Model(given, h)
    elif form == "made_and_called":
        given = h = keras.Input((3,))
        with StageMark(0):
            h = keras.layers.ReLU()(keras.layers.Dense(3, name="a")(h))
        with StageMark(1):
            h = keras.layers.Dense(2)(keras.ops.softmax(h))
        model = keras.Model(given, h)
    else:
        made = []
        for stage in range(2):
            with StageMark(stage):
                made += layers()[stage]
        model = keras.Sequential([*([keras.Input((3,))] if form == "made" else []), *made])
        if form == "built_late":
            model(np.ones((1, 3), "float32"))
    step = trained_by(model)
    assert [v.stage for v in step.variables] == [0, 0, 1, 1]
    assert marks(step, "Relu") == [0]
    assert marks(step, "Softmax") == [1]
    assert 0 in marks(step, "MatMul")
    assert 1 in marks(step, "MatMul")
    assert marks(step, "ReluGrad") == [None]


def test_a_layer_that_is_called_in_two_stages_computes_where_its_inputs_are():
    shared, given = keras.layers.ReLU(), keras.Input((3,))
    with StageMark(0):
        h = shared(keras.layers.Dense(3)(given))
    with StageMark(1):
        h = shared(keras.layers.Dense(2)(h))
    assert marks(trained_by(keras.Model(given, h)), "Relu") == [None, None]


def test_an_open_stage_counts_before_that_of_a_layer():
    with StageMark(0):
        layer = keras.layers.Dense(3)
    layer.build((None, 3))

    def step(x):
        with tf.GradientTape() as tape, StageMark(1):
            loss = tf.reduce_mean(layer(x))
        for variable, gradient in zip(layer.weights, tape.gradient(loss, layer.weights), strict=True):
            variable.value.assign_sub(gradient)
        return loss

    item = capture(step, np.ones((2, 3), "float32")).step
    assert {v.stage for v in item.variables} == {0}
    assert 1 in marks(item, "MatMul")
    assert 0 not in marks(item, "MatMul")


def test_nodes_outside_a_stage_have_no_mark():
    with StageMark(1):
        pass
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    assert not has_stage_marks(trained_by(model))
    assert "call" not in vars(model.layers[0])


def test_a_graph_of_tensorflow_1_is_marked():
    with tf.Graph().as_default() as graph, recording_gradients(in_functions=False) as notes:
        tf.compat.v1.enable_resource_variables()
        x = tf.compat.v1.placeholder(tf.float32, [None, 3])
        with StageMark(0):
            first = tf.compat.v1.get_variable("first", [3, 3])
            h = tf.nn.relu(x @ first)
        with StageMark(1):
            last = tf.compat.v1.get_variable("last", [3, 1])
            loss = tf.reduce_mean(tf.sin(h @ last))
        train = tf.compat.v1.train.GradientDescentOptimizer(0.1).minimize(loss)
        step = CapturedGraph.of(graph, notes.calls).step([loss.name], [train.name], {x.name: 0})
    assert stages(step) == {"first": 0, "last": 1}
    assert marks(step, "Relu") == [0]
    assert marks(step, "Sin") == [1]
    assert marks(step, "ReluGrad") == [None]
