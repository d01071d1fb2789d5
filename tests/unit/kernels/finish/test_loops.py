"""Work taken out of loops: the numbers of one device, and fewer products in each iteration."""

from __future__ import annotations

from collections import Counter
from functools import cache

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.unit.kernels.in_one_process import Session, assert_same, capture, one_device, plan, rewritten

layers = keras.layers

STEPS, WIDTH, UNITS = 5, 3, 4


def batches(count=2, examples=6):
    rng = np.random.default_rng(1)
    return [[rng.normal(size=(examples, STEPS, WIDTH))] for _ in range(count)]


def training(model):
    """Returns a step that trains a model to return zeros."""
    optimizer = keras.optimizers.Adam(0.01)
    variables = model.trainable_variables
    optimizer.build(variables)

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x)))
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    return step


def recurrent(*stack):
    return keras.Sequential([keras.Input((STEPS, WIDTH)), *stack, layers.Dense(1)])


MODELS = {
    "lstm": lambda: recurrent(layers.LSTM(UNITS, return_sequences=True)),
    "gru, reset before": lambda: recurrent(layers.GRU(UNITS, reset_after=False)),
    "simple": lambda: recurrent(layers.SimpleRNN(UNITS)),
    "without biases": lambda: recurrent(layers.SimpleRNN(UNITS, use_bias=False)),
    "bidirectional": lambda: recurrent(layers.Bidirectional(layers.LSTM(UNITS))),
    "stacked": lambda: recurrent(layers.LSTM(UNITS, return_sequences=True), layers.GRU(UNITS)),
    "masked": lambda: recurrent(layers.Masking(), layers.LSTM(UNITS)),
    "convolutional": lambda: recurrent(layers.Reshape((STEPS, WIDTH, 1)), layers.ConvLSTM1D(2, 2), layers.Flatten()),
}


def products_in(step):
    """Returns the number of matrix products in each loop of a step, the loops of the forward pass first."""
    bodies = {n.attr["body"].func.name for n in step.graph_def.node if n.op in ("While", "StatelessWhile")}
    functions = {f.signature.name: f for f in step.graph_def.library.function}
    counts = {name: Counter(n.op for n in functions[name].node_def)["MatMul"] for name in bodies}
    return [counts[name] for name in sorted(counts, key=lambda name: "_grad_" in name)]


@pytest.mark.parametrize(("name", "workers"), [(name, 1 + k % 2) for k, name in enumerate(MODELS) if name != "lstm"])
def test_layers_train_as_on_one_device(keras_in_float64, name, workers):
    keras.utils.set_random_seed(1)
    step = training(MODELS[name]())
    captured = capture(step, *batches()[0])
    session = Session(captured, plan(captured.step, workers, 2 // workers))
    assert sum(products_in(session.steps[0])) < sum(products_in(captured.step)) or name == "convolutional"
    assert_same(session.train(batches()), one_device(captured, step, batches()))


@cache
def lstm():
    """Returns a step of one layer, and the captured step."""
    step = training(MODELS["lstm"]())
    return step, capture(step, *batches()[0])


def test_variables_of_servers(keras_in_float64):
    step, captured = lstm()
    owners = {variable.name: k % 2 for k, variable in enumerate(captured.step.variables)}
    session = Session(captured, plan(captured.step, 2, 1, owners))
    assert_same(session.train(batches()), one_device(captured, step, batches()))


def test_an_lstm_multiplies_once_in_each_iteration(keras_in_float64):
    _, captured = lstm()
    assert products_in(captured.step) == [2, 4]
    (step,) = rewritten(captured, plan(captured.step, 1, 2))
    assert products_in(step) == [1, 2]


def test_new_nodes_are_on_the_devices_of_their_loops_and_reads_with_the_variables(keras_in_float64):
    _, captured = lstm()
    strategy = plan(captured.step, 1, 2)
    for k, replica in enumerate(strategy.graph_config.replicas):
        replica.device = f"gpu:{k}"
    (step,) = rewritten(captured, strategy)
    nodes = step.graph_index.nodes
    found = [node for name, node in nodes.items() if name.startswith(("autodist/transposed", "autodist/before"))]
    reads = [node for node in found if node.op == "ReadVariableOp"]
    assert {node.device[-5:] for node in found} >= {"GPU:0", "GPU:1"}
    assert reads and all(read.device == nodes[read.input[0]].device for read in reads)


# -- loops of a script ------------------------------------------------------------------------------------------------


def scripted(compute, *shapes):
    rng = np.random.default_rng(2)
    weights = [tf.Variable(rng.normal(size=shape) / 3, name=f"w{k}") for k, shape in enumerate(shapes)]

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(compute(x, *weights)))
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(0.1 * gradient)
        return loss

    return step


def of_steps(x):
    return tf.TensorArray(x.dtype, STEPS).unstack(tf.transpose(x, [1, 0, 2]))


def while_loop(x, w, r):
    read = of_steps(x)
    h = tf.zeros([tf.shape(x)[0], UNITS], x.dtype)
    return tf.while_loop(lambda t, h: t < STEPS, lambda t, h: (t + 1, tf.tanh(read.read(t) @ w + h @ r)), (0, h))[1]


def without_maximum(x, w, r):
    read = of_steps(x)
    h = tf.zeros([tf.shape(x)[0], UNITS], x.dtype)
    for t in tf.range(STEPS):
        h = tf.tanh(read.read(t) @ w + h @ r)
    return h


def scan(x, w, r):
    h = tf.zeros([tf.shape(x)[0], UNITS], x.dtype)
    return tf.scan(lambda h, e: tf.tanh(e @ w + h @ r), tf.transpose(x, [1, 0, 2]), h)


def transposed_weights(x, w, r):
    read = of_steps(x)
    h = tf.zeros([tf.shape(x)[0], UNITS], x.dtype)
    for t in tf.range(STEPS):
        h = tf.tanh(tf.matmul(read.read(t), w, transpose_b=True) + tf.matmul(h, r, transpose_b=True))
    return h


def one_matrix_twice(x, w, r):
    read = of_steps(x)
    h = tf.zeros([tf.shape(x)[0], UNITS], x.dtype)
    for t in tf.range(STEPS):
        h = tf.tanh(read.read(t) @ w + tf.sigmoid(h @ r) @ r)
    return h


def a_computed_matrix(x, w, r):
    read = of_steps(x)
    h = tf.zeros([tf.shape(x)[0], UNITS], x.dtype)
    for t in tf.range(STEPS):
        h = tf.tanh(read.read(t) @ tf.nn.softmax(w) + h @ (r - tf.transpose(r)))
    return h


def a_matrix_that_changes(x, w, r):
    read = of_steps(x)
    h = tf.zeros([tf.shape(x)[0], UNITS], x.dtype)
    for t in tf.range(STEPS):
        h = tf.tanh(read.read(t) @ w + h @ r)
        r = r * 0.5
    return h


def ends_by_its_values(x, w, r):
    read = of_steps(x)
    h = tf.zeros([tf.shape(x)[0], UNITS], x.dtype)
    return tf.while_loop(
        lambda t, h: (t < STEPS) & (tf.reduce_sum(tf.abs(r)) < 1000.0),
        lambda t, h: (t + 1, tf.tanh(read.read(t) @ w + h @ r)),
        (2, h),
    )[1]


def never_runs(x, w, r):
    read = of_steps(x)
    h = x[:, 0] @ w @ r
    return tf.while_loop(lambda t, h: t < 0, lambda t, h: (t + 1, tf.tanh(read.read(t) @ w + h @ r)), (0, h))[1]


LOOPS = [
    while_loop, without_maximum, scan, one_matrix_twice, a_computed_matrix, a_matrix_that_changes, ends_by_its_values,
    never_runs,
]  # fmt: skip


@pytest.mark.parametrize("compute", LOOPS)
def test_loops_of_a_script_train_as_on_one_device(compute):
    step = scripted(compute, (WIDTH, UNITS), (UNITS, UNITS))
    captured = capture(step, *batches()[0])
    session = Session(captured, plan(captured.step, 1, 2))
    assert_same(session.train(batches()), one_device(captured, step, batches()))


def test_matrices_that_are_transposed(keras_in_float64):
    step = scripted(transposed_weights, (UNITS, WIDTH), (UNITS, UNITS))
    captured = capture(step, *batches()[0])
    session = Session(captured, plan(captured.step, 1, 2))
    assert_same(session.train(batches()), one_device(captured, step, batches()))


def test_a_matrix_that_is_written_after_the_loop_is_the_one_before(keras_in_float64):
    w, r = (tf.Variable(np.random.default_rng(3).normal(size=(n, UNITS)), name=f"w{n}") for n in (WIDTH, UNITS))
    decayed = tf.Variable(r, trainable=False, name="decayed")

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(while_loop(x, w, decayed)))
            decayed.assign(decayed * 0.5)
        w.assign_sub(0.1 * tape.gradient(loss, w))
        return loss

    captured = capture(step, *batches()[0])
    for workers in (1, 2):
        session = Session(captured, plan(captured.step, workers, 2 // workers))
        assert any(name.startswith("autodist/transposed") for name in session.steps[0].graph_index.nodes)
        assert_same(session.train(batches()), one_device(captured, step, batches()))


def test_nothing_is_done_to_loops_without_products(keras_in_float64):
    w = tf.Variable(np.ones(WIDTH), name="w")

    def step(x):
        with tf.GradientTape() as tape:
            sums = tf.scan(lambda total, e: total + e * w, tf.transpose(x, [1, 0, 2]), x[:, 0])
            loss = tf.reduce_mean(tf.square(sums))
        w.assign_sub(0.1 * tape.gradient(loss, w))
        return loss

    captured = capture(step, *batches()[0])
    (made,) = rewritten(captured, plan(captured.step, 1, 2))
    known = {function.signature.name for function in captured.step.graph_def.library.function}
    assert {function.signature.name for function in made.graph_def.library.function} <= known
