"""XLA compilation requested by a script: the same training, in a function for each replica and one for the update."""

from __future__ import annotations

import logging
from dataclasses import replace

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autodist.capture.gradients import recording_gradients
from autodist.capture.graph_mode import CapturedGraph
from autodist.graph.names import is_control
from autodist.kernels import Context, rewrite
from autodist.kernels.communicate import reduce_by_shuffle
from autodist.kernels.finish.compile_step import CompileStep
from autodist.kernels.pipeline import KERNELS
from autodist.proto import strategy_pb2
from tests.unit.kernels.dense_steps import dense_step
from tests.unit.kernels.drawn_programs import make_program, programs
from tests.unit.kernels.drawn_steps import CHOICES, make_step
from tests.unit.kernels.drawn_steps import make_batches as batches_of_words
from tests.unit.kernels.drawn_strategies import kept, strategy_of
from tests.unit.kernels.in_one_process import Session, assert_same, capture, one_device, plan, rewritten

WITHOUT = tuple(k for k in KERNELS if not isinstance(k, CompileStep))

optimizers = keras.optimizers


def asking(step, *examples):
    return capture(step, *examples, jit_compile=True)


def batches(*sizes):
    rng = np.random.default_rng(1)
    return [[rng.normal(size=(size, 4))] for size in sizes]


def called(step):
    """Returns the function of each call, and the nodes outside of calls."""
    return [n.attr["f"].func.name for n in step.graph_def.node if n.op == "StatefulPartitionedCall"]


def ops_in(step, *prefixes):
    """Ops of captured nodes that stand outside of every function."""
    return [n.op for n in step.graph_def.node if not n.name.startswith("autodist/") and n.op.startswith(prefixes)]


def body_of(step, function):
    (found,) = (f for f in step.graph_def.library.function if f.signature.name == function)
    return [n.op for n in found.node_def]


def writes_in(step, function):
    return [op for op in body_of(step, function) if op.startswith("Assign")]


def test_a_step_that_does_not_ask_stays_as_it_is(keras_in_float64):
    captured = capture(dense_step(optimizers.Adam()), *batches(8)[0])
    strategy = plan(captured.step, 1, 2)
    (plain,) = rewritten(captured, strategy, WITHOUT)
    assert CompileStep().apply(plain, Context(strategy, 0)) is plain


def test_alone_the_whole_step_is_one_function(keras_in_float64):
    captured = asking(dense_step(optimizers.Adam()), *batches(8)[0])
    (step,) = rewritten(captured, plan(captured.step))
    (function,) = called(step)
    assert len(writes_in(step, function)) == 7  # two weights, their two slots each, and the iterations
    assert {n.op for n in step.graph_def.node} == {
        "Placeholder", "PlaceholderWithDefault", "Const", "VarHandleOp", "StatefulPartitionedCall",
    }  # fmt: skip


def test_replicas_share_a_function_and_the_update_is_another(keras_in_float64):
    step = dense_step(optimizers.Adam())
    captured = asking(step, *batches(8)[0])
    session = Session(captured, plan(captured.step, 1, 2))
    (item,) = session.steps
    first, second, third = sorted(called(item), key=called(item).count, reverse=True)
    assert first == second != third
    assert not writes_in(item, first) and len(writes_in(item, third)) == 6
    assert not ops_in(item, "MatMul", "Tanh", "Square")
    assert_same(session.train(batches(8, 5, 1)), one_device(captured, step, batches(8, 5, 1)))


def test_ops_that_only_xla_supports_are_compiled_in_any_size(keras_in_float64):
    """Keras requests compilation only of the grouped convolution, which no CPU kernel supports."""
    model = keras.Sequential([keras.layers.Conv3D(4, 2, strides=2, groups=2), keras.layers.Flatten()])
    model.build((None, 4, 4, 4, 2))
    optimizer = optimizers.SGD(0.1)

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x)))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    rng = np.random.default_rng(1)
    examples = [[rng.normal(size=(size, 4, 4, 4, 2))] for size in (4, 4, 3)]
    captured = capture(step, *examples[0])
    session = Session(captured, plan(captured.step, 1, 2))
    assert all(called(step) for step in session.steps)
    assert_same(session.train(examples), one_device(captured, step, examples))


PARTS = {
    "nothing": (strategy_pb2.Compilation(), False, False),
    "the computation": (strategy_pb2.Compilation(computation=strategy_pb2.Compilation.WHOLE), True, False),
    "the updates": (strategy_pb2.Compilation(updates=True), False, True),
    "both": (strategy_pb2.Compilation(computation=strategy_pb2.Compilation.WHOLE, updates=True), True, True),
}


@pytest.mark.parametrize(
    "part, machines, is_requested",
    [(part, (2, 1), bool(k % 2)) for k, part in enumerate(PARTS)]
    + [(part, (1, 1 + bool(k)), not k % 2) for k, part in enumerate(PARTS)],
)
def test_a_strategy_says_what_is_compiled_whatever_the_script_requests(keras_in_float64, part, machines, is_requested):
    compilation, compiles_products, compiles_writes = PARTS[part]
    step = dense_step(optimizers.Adam())
    captured = capture(step, *batches(8)[0], jit_compile=is_requested)
    strategy = plan(captured.step, *machines, one_machine=True)
    strategy.graph_config.compilation.CopyFrom(compilation)
    session = Session(captured, strategy)
    for item in session.steps:
        assert bool(ops_in(item, "MatMul")) is not compiles_products
        # The step counter has an update of its own, which is too small to be compiled.
        writes = len(ops_in(item, "Assign"))
        assert writes <= 1 if compiles_writes else writes == 7
    assert_same(session.train(batches(8, 6)), one_device(captured, step, batches(8, 6)))


def test_numbers_are_drawn_without_xla_if_only_the_strategy_requests_it():
    weight = tf.Variable(tf.ones([4], tf.float64))

    def step(x):
        with tf.GradientTape() as tape:
            mask = tf.random.stateless_uniform(tf.shape(x), [1, 2], dtype=tf.float64)
            loss = tf.reduce_sum(tf.tanh(x * mask) * weight)
        weight.assign_sub(0.1 * tape.gradient(loss, weight))
        return loss

    captured = capture(step, *batches(8)[0])
    strategy = plan(captured.step)
    strategy.graph_config.compilation.CopyFrom(PARTS["both"][0])
    session = Session(captured, strategy)
    assert ops_in(session.steps[0], "StatelessRandomUniform")
    assert not ops_in(session.steps[0], "Tanh")
    assert_same(session.train(batches(8)), one_device(captured, step, batches(8)))


OPTIMIZERS = {
    "nesterov": lambda: optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "clipped": lambda: optimizers.AdamW(0.01, weight_decay=0.1, global_clipnorm=0.1),
    "average": lambda: optimizers.Adam(0.01, use_ema=True, ema_momentum=0.9),
    "lamb": lambda: optimizers.Lamb(0.01),
}


@pytest.mark.parametrize(
    "optimizer, owners", [("nesterov", ()), ("clipped", (0,)), ("average", (1, 0)), ("lamb", (0,))]
)
def test_workers_train_as_one_device_does(keras_in_float64, optimizer, owners):
    step = dense_step(OPTIMIZERS[optimizer]())
    captured = asking(step, *batches(8)[0])
    trained = list(dict.fromkeys(g.variable for g in captured.step.gradients))
    strategy = plan(captured.step, 2, 1, dict(zip(trained, owners, strict=False)), one_machine=True)
    session = Session(captured, strategy)
    assert all(called(step) for step in session.steps)
    data = batches(5, 4, 4)  # XLA compiles again for each length of a part
    assert_same(session.train(data), one_device(captured, step, data))


@pytest.mark.parametrize("spec, workers, replicas", [("SHUFFLE", 2, 2), ("RING", 3, 1)])
def test_an_update_of_all_workers_is_the_same_function_on_each(keras_in_float64, spec, workers, replicas):
    step = dense_step(optimizers.Adam(0.01, global_clipnorm=0.1))
    captured = asking(step, *batches(8)[0])
    strategy = plan(captured.step, workers, replicas, one_machine=True)
    for k, node in enumerate(strategy.nodes):
        node.all_reduce.spec, node.all_reduce.group = strategy_pb2.AllReduce.Spec.Value(spec), k
    one, *others = [called(step) for step in rewritten(captured, strategy)]
    assert others == [one] * (workers - 1)


def test_an_update_that_unlike_machines_would_make_side_by_side_is_not_compiled(keras_in_float64):
    step = dense_step(optimizers.Adam())
    captured = asking(step, *batches(8)[0])
    session = Session(captured, plan(captured.step, 2, 1))
    for item in session.steps:
        (function,) = called(item)
        assert "MatMul" in body_of(item, function) and not writes_in(item, function)
        assert not {"Pow", "Sqrt"}.intersection(body_of(item, function))
    assert_same(session.train(batches(8, 5)), one_device(captured, step, batches(8, 5)))


def test_gradients_in_two_buckets_are_updated_in_two_functions(keras_in_float64, monkeypatch):
    """The bucket that arrives first does not wait for the later one; small buckets would be joined."""
    monkeypatch.setattr(reduce_by_shuffle, "find_fused_buckets", lambda step, buckets, context: ([], list(buckets)))
    captured = asking(dense_step(optimizers.Adam()), *batches(8)[0])
    strategy = plan(captured.step, 2, 1, one_machine=True)
    for k, node in enumerate(strategy.nodes):
        node.all_reduce.group = k
    for step in rewritten(captured, strategy):
        assert sorted(len(writes_in(step, function)) for function in called(step)) == [0, 3, 3]


def test_ops_that_xla_cannot_compile_stay_outside_and_are_logged(caplog):
    weight = tf.Variable(np.linspace(-1.0, 1.0, 4))

    def step(x):
        with tf.GradientTape() as tape:
            hidden = tf.tanh(x * weight) * 2.0
            far = tf.boolean_mask(hidden, hidden > 0.5)
            loss = tf.reduce_mean(tf.square(hidden)) + 0.0 * tf.reduce_sum(far)
        weight.assign_sub(tape.gradient(loss, weight) * 0.1)
        return loss

    given = [[np.random.default_rng(k).normal(size=(6, 4))] for k in range(2)]
    captured = asking(step, *given[0])
    with caplog.at_level(logging.INFO, logger="autodist"):
        session = Session(captured, plan(captured.step, 1, 1))
    (said,) = [r.message for r in caplog.records if "without it" in r.message]
    assert "Where" in said and "Tanh" not in said
    assert ops_in(session.steps[0], "Where") and not ops_in(session.steps[0], "Tanh")
    assert_same(session.train(given), one_device(captured, step, given))


def test_seeded_draws_are_those_without_xla_and_differ_between_replicas():
    weight = tf.Variable(np.ones(4))

    def step(x):
        with tf.GradientTape() as tape:
            noise = tf.random.uniform(tf.shape(x), seed=3, dtype=tf.float64)
            loss = tf.reduce_mean(tf.square(tf.tanh(x * weight) * 2.0 + noise))
        weight.assign_sub(tape.gradient(loss, weight) * 0.1)
        return loss, noise

    given = [[np.zeros((4, 4))]]
    captured = asking(step, *given[0])
    strategy = plan(captured.step, 1, 2)
    compiled, plain = (Session(captured, strategy, kernels) for kernels in (KERNELS, WITHOUT))
    assert called(compiled.steps[0])
    (found,), (wanted,) = compiled.train(given).outputs[0], plain.train(given).outputs[0]
    assert not np.array_equal(found[1][:2], found[1][2:])
    np.testing.assert_array_equal(found[1], wanted[1])


def test_stateless_draws_differ_between_replicas(keras_in_float64):
    drop, weight = keras.layers.Dropout(0.5, seed=1), keras.Variable(np.ones(32), name="weight")
    drop.build((None, 32))

    def step(x):
        with tf.GradientTape() as tape:
            dropped = drop(x * weight.value, training=True)
            loss = tf.reduce_mean(tf.square(dropped))
        weight.value.assign_sub(tape.gradient(loss, weight.value) * 0.1)
        return dropped

    given = [[np.ones((2, 32))]]
    captured = asking(step, *given[0])
    session = Session(captured, plan(captured.step, 1, 2))
    assert not ops_in(session.steps[0], "StatelessRandomUniform")
    ((dropped,),) = session.train(given).outputs[0]
    assert set(np.unique(dropped)) == {0.0, 2.0}
    assert not np.array_equal(dropped[0], dropped[1])


def test_an_assertion_still_stops_the_step():
    weight = tf.Variable(np.ones(4))

    def step(x):
        tf.debugging.assert_positive(x)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.tanh(x * weight)))
        weight.assign_sub(tape.gradient(loss, weight) * 0.1)
        return loss

    captured = asking(step, np.ones((4, 4)))
    session = Session(captured, plan(captured.step, 1, 2))
    assert called(session.steps[0])
    with pytest.raises(tf.errors.InvalidArgumentError, match="x > 0"):
        session.train([[-np.ones((4, 4))]])


def test_a_nested_function_is_compiled_with_its_gradient_and_nothing_else():
    weight, scale = tf.Variable(np.linspace(-1.0, 1.0, 4)), tf.Variable(np.ones(4))

    @tf.function(jit_compile=True)
    def loss_of(hidden):
        return tf.reduce_mean(tf.square(tf.sin(hidden * weight)))

    def step(x):
        with tf.GradientTape() as tape:
            loss = loss_of(tf.tanh(x * scale))
        first, second = tape.gradient(loss, [weight, scale])
        weight.assign_sub(first * 0.1)
        scale.assign_sub(second * 0.1)
        return loss

    given = [[np.random.default_rng(k).normal(size=(6, 4))] for k in range(2)]
    captured = capture(step, *given[0])
    session = Session(captured, plan(captured.step, 1, 2))
    (item,) = session.steps
    (function,) = set(called(item))
    assert {"Sin", "Cos", "Square"} <= set(body_of(item, function))
    assert not {"Tanh", "TanhGrad"} & set(body_of(item, function)) and not writes_in(item, function)
    assert ops_in(item, "TanhGrad") and ops_in(item, "AssignSub")
    assert_same(session.train(given), one_device(captured, step, given))


@pytest.fixture
def recurrent(keras_in_float64):
    """Makes steps of a recurrent layer, whose forward pass is in a function with or without XLA; and batches."""
    net = keras.Sequential([keras.Input((5, 4)), keras.layers.SimpleRNN(3), keras.layers.Dense(2)])
    optimizer = optimizers.Adam(0.01)
    optimizer.build(net.trainable_variables)

    def step_with(asks):
        @tf.function(jit_compile=asks)
        def loss_of(x):
            return tf.reduce_mean(tf.square(net(x)))

        def step(x):
            with tf.GradientTape() as tape:
                loss = loss_of(x)
            gradients = tape.gradient(loss, net.trainable_variables)
            optimizer.apply_gradients(zip(gradients, net.trainable_variables, strict=True))
            return loss

        return step

    return step_with, [[np.random.default_rng(k).normal(size=(4, 5, 4))] for k in range(2)]


def test_loops_and_their_gradients_are_part_of_a_replicas_function(recurrent):
    step_with, given_batches = recurrent
    captured = asking(step_with(None), *given_batches[0])
    session = Session(captured, plan(captured.step, 1, 2))
    assert not any(ops_in(step, "While", "StatelessWhile", "TensorList") for step in session.steps)
    assert_same(session.train(given_batches), one_device(captured, step_with(None), given_batches), rtol=1e-11)


@pytest.mark.feature("function", "model: recurrent layers, `tf.while_loop`")
def test_loops_of_a_nested_function_stay_outside(recurrent):
    step_with, given_batches = recurrent
    captured = capture(step_with(True), *given_batches[0])
    session = Session(captured, plan(captured.step, 1, 2))
    (step,) = session.steps
    assert called(step) and ops_in(step, "While")
    assert_same(session.train(given_batches), one_device(captured, step_with(None), given_batches), rtol=1e-11)


def test_names_of_the_script_that_look_like_a_replicas_are_told_apart():
    weight = tf.Variable(np.linspace(-1.0, 1.0, 4))

    def step(x):
        with tf.GradientTape() as tape:
            first = tf.tanh(x * weight, name="activation")
            with tf.name_scope("replica_1"):
                loss = tf.reduce_mean(tf.square(tf.tanh(first * 0.5, name="activation")))
        weight.assign_sub(tape.gradient(loss, weight) * 0.1)
        return loss

    given_batches = [[np.random.default_rng(k).normal(size=(4, 4))] for k in range(2)]
    captured = asking(step, *given_batches[0])
    for shape in ((1, 1), (2, 1)):
        session = Session(captured, plan(captured.step, *shape, one_machine=True))
        assert all(called(step) for step in session.steps)
        assert_same(session.train(given_batches), one_device(captured, step, given_batches))


def test_control_inputs_of_a_call_are_those_of_its_nodes(keras_in_float64):
    """A write waits for reads that stand in another function, and a read after it for the write."""
    weight, seen = tf.Variable(np.linspace(-1.0, 1.0, 4)), tf.Variable(np.zeros(4), trainable=False)

    def step(x):
        before = tf.identity(seen) * 2.0 + 1.0
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.sin(x * weight)))
        gradient = tape.gradient(loss, weight)
        seen.assign_add(gradient * 3.0)
        weight.assign_sub(seen * 0.1)
        return before, tf.identity(seen) + 1.0, tf.identity(weight) * 2.0

    given = [[np.random.default_rng(k).normal(size=(6, 4))] for k in range(3)]
    captured = asking(step, *given[0])
    for workers, replicas in ((1, 1), (1, 2), (2, 1)):
        session = Session(captured, plan(captured.step, workers, replicas, one_machine=True))
        assert all(called(step) for step in session.steps)
        assert_same(session.train(given), one_device(captured, step, given))


@settings(max_examples=2, suppress_health_check=[HealthCheck.too_slow])
@given(program=programs(), shape=st.sampled_from([(1, 1), (1, 2), (2, 1)]))
def test_random_programs_do_what_they_do_uncompiled(program, shape):
    step = make_program(program)
    given_batches = [[np.random.default_rng(k).normal(size=(4, 3))] for k in range(2)]
    captured = asking(step, *given_batches[0])
    strategy = plan(captured.step, *shape, one_machine=True)
    wanted = Session(captured, strategy, WITHOUT).train(given_batches)
    wanted = replace(wanted, outputs=[outputs[:1] for outputs in wanted.outputs])  # each worker's are the same
    assert_same(Session(captured, strategy).train(given_batches), wanted, rtol=1e-10)


@settings(max_examples=2, suppress_health_check=[HealthCheck.too_slow])
@given(
    choices=CHOICES,
    shape=st.sampled_from([(1, 2), (2, 1), (2, 2), (3, 1)]),
    servers=st.sampled_from([0, 0, 1]),
    kept_by_name=st.fixed_dictionaries({name: kept() for name in ("table", "kernel", "gain")}),
)
def test_random_assignments_train_as_one_device_does_and_no_two_workers_wait_for_each_other(
    choices, shape, servers, kept_by_name
):
    step, given_batches = make_step(choices), batches_of_words(3, [5, 5])
    captured = asking(step, *given_batches[0])
    strategy = strategy_of(captured.step, *shape, kept_by_name=kept_by_name, servers=servers if shape[0] > 1 else 0)
    strategy.graph_config.one_machine = True
    found = Session(captured, strategy).train(given_batches)
    assert_same(found, one_device(captured, step, given_batches), rtol=1e-9)


def test_attributes_of_tensorflow_1s_jit_scope_are_kept_in_every_replica():
    """The attributes control TensorFlow's own clustering; `global_jit_level` also clusters the rewritten graph."""
    with tf.Graph().as_default() as graph, recording_gradients(in_functions=False) as notes:
        weight = tf.compat.v1.get_variable("weight", [4], tf.float64, use_resource=True)
        x = tf.compat.v1.placeholder(tf.float64, [None, 4], "x")
        with tf.xla.experimental.jit_scope():
            hidden = tf.tanh(x * weight)
        tf.compat.v1.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_mean(hidden), name="train")
    step = CapturedGraph.of(graph, notes.calls).step([], ["train"], {"x:0": 0})
    scopes = {n.name: n.attr["_XlaScope"].s for n in step.graph_def.node if "_XlaCompile" in n.attr}
    assert {"Tanh", "gradients/Tanh_grad/TanhGrad"} <= scopes.keys()
    found = rewrite(step, Context(plan(step, 1, 2), 0), kernels=KERNELS)
    attributes = {n.name: n.attr for n in found.graph_def.node}
    for name in ("Tanh", "gradients/Tanh_grad/TanhGrad"):
        for copy in (name, f"autodist/replica_1/{name}"):
            assert attributes[copy]["_XlaCompile"].b and attributes[copy]["_XlaScope"].s == scopes[name]
    assert not called(found)


def test_no_control_input_of_a_function_leads_outside(keras_in_float64):
    captured = asking(dense_step(optimizers.Adam()), *batches(8)[0])
    for step in rewritten(captured, plan(captured.step, 2, 2, one_machine=True)):
        for function in step.graph_def.library.function:
            inside = {n.name for n in function.node_def}
            assert {i[1:] for n in function.node_def for i in n.input if is_control(i)} <= inside
