"""Values for cached copies are sent encoded: replicas compute with rounded values, owners update exact ones."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from autodist.compressors import BFloat16, Dense, Float8, Float16, Int8
from autodist.compressors.values import ValueCode
from autodist.errors import StrategyError
from autodist.placement.partitioning import Partitioning
from autodist.proto import strategy_pb2
from autodist.strategies import synced_variables
from autodist.strategies.cost import traffic
from autodist.strategies.nodes import partitioned_node
from tests.unit.kernels.in_one_process import Session, capture, plan, rewritten, train
from tests.unit.kernels.wire import sent_bytes

COMPRESSORS = [Int8(block=8), Float8(block=16), Float16(), BFloat16()]
RATE = 0.1
RNG = np.random.default_rng(3)
INITIAL = {"kernel": RNG.normal(size=(6, 4)), "bias": RNG.normal(size=4), "scale": RNG.normal(size=())}
CUT = Partitioning(0, (2, 3, 1))
BATCHES = [(RNG.normal(size=(n, 6)),) for n in (7, 1, 4, 9, 5)]


def loss_of(values, x):
    kernel, bias, scale = values
    return tf.reduce_mean(tf.reduce_sum(tf.tanh(x @ kernel + bias) ** 2, 1)) * scale**2


def linear_step():
    variables = [tf.Variable(value, name=name) for name, value in INITIAL.items()]

    def step(x):
        with tf.GradientTape() as tape:
            loss = loss_of(variables, x)
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(RATE * gradient)
        return loss

    return step


def sharded_plan(step, compressor, workers=3, **options):
    """The kernel in shards of three workers, the bias at one of them, the scale all-reduced."""
    servers = [
        strategy_pb2.ParameterServer(owner=owner, local_proxy=True, value_compressor=compressor.to_message(), **options)
        for owner in (0, 1, 2)
    ]
    strategy = plan(step, workers)
    for node in strategy.nodes:
        if node.variable == "kernel":
            node.CopyFrom(partitioned_node("kernel", CUT, servers))
        elif node.variable == "bias":
            node.parameter_server.CopyFrom(servers[1])
    return strategy


def rounded(compressor, value):
    return ValueCode.of(compressor.encoding, value.shape, tf.float64).rounded(tf.constant(value)).numpy()


def as_copies(compressor, values):
    """The values with which replicas compute."""
    shards = np.split(values["kernel"], np.cumsum(CUT.sizes)[:-1])
    kernel = np.concatenate([rounded(compressor, shard) for shard in shards])
    return {"kernel": kernel, "bias": rounded(compressor, values["bias"]), "scale": values["scale"]}


def on_one_device(compressor, batches):
    """Trains exact values with the gradients at the rounded ones; returns both, and the losses."""
    values, losses = dict(INITIAL), []
    for (x,) in batches:
        used = {name: tf.Variable(value) for name, value in as_copies(compressor, values).items()}
        with tf.GradientTape() as tape:
            loss = loss_of(list(used.values()), x)
        gradients = tape.gradient(loss, used)
        values = {name: values[name] - RATE * gradients[name].numpy() for name in values}
        losses.append(loss.numpy())
    return values, losses


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=lambda one: one.kind)
@pytest.mark.parametrize("options", [{}, {"servers": 1}])
def test_owners_update_exact_values_with_gradients_at_rounded_ones(compressor, options):
    captured = capture(linear_step(), *BATCHES[0])
    strategy = sharded_plan(captured.step, compressor)
    strategy.graph_config.workers += options.get("servers", 0)
    trained = train(captured, strategy, BATCHES)
    values, losses = on_one_device(compressor, BATCHES)
    for name, value in values.items():
        np.testing.assert_allclose(trained.variable(name), value, rtol=1e-12, atol=1e-12)
    for worker in range(3):
        np.testing.assert_allclose([step[worker][0] for step in trained.outputs], losses, rtol=1e-12)


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=lambda one: one.kind)
def test_all_workers_have_the_same_bits_in_their_copies(compressor):
    captured = capture(linear_step(), *BATCHES[0])
    session = Session(captured, sharded_plan(captured.step, compressor))
    copies = {}
    with session.graph.as_default():
        for handle, name, code in session.copies():
            variable = session.graph.get_tensor_by_name(handle)
            copies.setdefault(name, []).append(tf.raw_ops.ReadVariableOp(resource=variable, dtype=tf.float64))
            assert code.code is not None
    session.start()
    for batch in BATCHES[:3]:
        session.step(batch)
    exact, found = session.session.run([session.reads, copies])
    assert {name: len(values) for name, values in found.items()} == dict.fromkeys(
        ["kernel/shard_0", "kernel/shard_1", "kernel/shard_2", "bias"], 3  # on each worker, the owner included
    )  # fmt: skip
    for name, values in found.items():
        at_owner = next(own[name] for own in exact if name in own)
        for value in values:
            np.testing.assert_array_equal(value, rounded(compressor, at_owner))


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=lambda one: one.kind)
def test_the_bytes_are_those_of_the_plan(compressor):
    captured = capture(linear_step(), *BATCHES[0])
    strategy = sharded_plan(captured.step, compressor)
    planned = np.zeros(3, int)
    synced = {variable.name: variable for variable in synced_variables(captured.step)}
    for node in strategy.nodes:
        if node.variable != "scale":
            planned += traffic(synced[node.variable], node, strategy.graph_config).step
    sent = [sent_bytes(step) for step in rewritten(captured, strategy)]
    others = ("whole", "gradient")  # the tags of messages with values are digests
    sent_values = [sum(count for what, count in own.items() if what not in others) for own in sent]
    values = sum(compressor.value_bytes(Dense(shape, 8)) for shape in ((2, 4), (3, 4), (1, 4), (4,)))
    assert sum(sent_values) == 2 * values
    assert planned.sum() == 2 * (values + 8 * (24 + 4))


@pytest.mark.parametrize("is_derived", [False, True])
def test_an_update_that_would_use_rounded_values_is_refused(is_derived):
    captured = capture(shared_read_step(is_derived), *BATCHES[0])
    with pytest.raises(StrategyError, match="bias has a value_compressor, and .* as the loss does"):
        rewritten(captured, sharded_plan(captured.step, Int8()))


def shared_read_step(is_derived):
    """As `linear_step`; the update of the bias uses the value that the loss has read, or one computed from it."""
    variables = [tf.Variable(value, name=name) for name, value in INITIAL.items()]
    kernel, bias, scale = variables

    def step(x):
        with tf.GradientTape() as tape:
            read = tf.convert_to_tensor(bias)
            used = read / 2 + read / 2 if is_derived else read
            loss = loss_of([kernel, used, scale], x)
        by_kernel, by_bias, by_scale = tape.gradient(loss, variables)
        kernel.assign_sub(RATE * by_kernel)
        bias.assign(used - RATE * by_bias)
        scale.assign_sub(RATE * by_scale)

    return step
