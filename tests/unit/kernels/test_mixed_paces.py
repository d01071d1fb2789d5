"""Every variable, and every shard, with a sync mode of its own: the trained values do not change."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autodist.proto import strategy_pb2
from tests.unit.kernels.communicate.test_stale_servers import assert_trains_as_one_device
from tests.unit.kernels.drawn_steps import make_batches
from tests.unit.kernels.in_one_process import capture, one_device, plan, train

WORKERS, SERVERS = 2, 1
SIZES = {"table": (7, 2), "kernel": (2,), "gain": ()}

SERVER = st.builds(
    strategy_pb2.ParameterServer,
    owner=st.integers(0, WORKERS + SERVERS - 1),
    staleness=st.sampled_from([0, 0, 1, 3]),
    local_proxy=st.booleans(),
)


def shard(server: strategy_pb2.ParameterServer | None) -> strategy_pb2.Shard:
    if server is None:
        return strategy_pb2.Shard(all_reduce=strategy_pb2.AllReduce(spec=strategy_pb2.AllReduce.SHUFFLE))
    return strategy_pb2.Shard(parameter_server=server)


def node(name: str, servers: list[strategy_pb2.ParameterServer | None]) -> strategy_pb2.VariableNode:
    """A variable cut along its first axis into as many shards as there are synchronizers; whole, if there is one."""
    if len(servers) == 1 or not SIZES[name]:
        whole = shard(servers[0])
        found = strategy_pb2.VariableNode(variable=name)
        if whole.HasField("all_reduce"):
            found.all_reduce.CopyFrom(whole.all_reduce)
        else:
            found.parameter_server.CopyFrom(whole.parameter_server)
        return found
    servers = servers[: SIZES[name][0]]
    each, rest = divmod(SIZES[name][0], len(servers))
    sizes = [each + (k < rest) for k in range(len(servers))]
    cut = strategy_pb2.Partition(axis=0, sizes=sizes)
    return strategy_pb2.VariableNode(variable=name, partition=cut, shards=[shard(s) for s in servers])


SYNCHRONIZERS = st.lists(st.none() | SERVER, min_size=1, max_size=3)


@settings(max_examples=5, suppress_health_check=[HealthCheck.too_slow])
@given(
    nodes=st.fixed_dictionaries(dict.fromkeys(SIZES, SYNCHRONIZERS)),
    optimizer=st.sampled_from(["adam", "adamw", "average", "momentum", "sgd"]),
)
def test_updates_are_those_of_one_device(nodes, optimizer):
    def strategy(step):
        made = plan(step, WORKERS, 1, servers=SERVERS)
        made.ClearField("nodes")
        made.nodes.extend(node(name, servers) for name, servers in nodes.items())
        return made

    assert_trains_as_one_device(optimizer, strategy)


def test_a_slot_has_the_pace_of_its_own_shard():
    """Nesterov's momentum is read as a whole before the update, for all shards, and is written shard by shard."""

    def strategy(step):
        made = plan(step, WORKERS, 1, servers=SERVERS)
        stale, synchronous = (strategy_pb2.ParameterServer(owner=owner, staleness=3 * owner) for owner in (1, 0))
        del made.nodes[0]
        made.nodes.append(node("table", [None, stale, synchronous]))
        return made

    assert_trains_as_one_device("momentum", strategy)


def two_updates():
    """A second gradient is made after the first update, and does not depend on it."""
    rng = np.random.default_rng(1)
    first = keras.Variable(rng.normal(size=2), dtype="float64", name="first")
    second = keras.Variable(rng.normal(size=2), dtype="float64", name="second")
    optimizers = [keras.optimizers.Adam(0.1), keras.optimizers.SGD(0.1, momentum=0.9)]
    for optimizer, variable in zip(optimizers, (first, second), strict=True):
        optimizer.build([variable])

    def step(ids: tf.Tensor, x: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(x * first.value) + 0.0 * tf.reduce_mean(tf.cast(ids, tf.float64))
        optimizers[0].apply_gradients([(tape.gradient(loss, first.value), first)])
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(x * (second.value + first.value))
        optimizers[1].apply_gradients([(tape.gradient(loss, second.value), second)])

    return step


@pytest.mark.parametrize(
    "owners, staleness, local_proxy",
    [
        ({"first": 0, "second": 0}, 0, True), ({"first": 0, "second": 0}, 2, False),
        ({"first": 1, "second": 0}, 0, False), ({"first": 1, "second": 0}, 2, True),
        ({"first": 2, "second": 1}, 2, True),
    ],
)  # fmt: skip
def test_two_updates_in_a_step(owners, staleness, local_proxy):
    batches, step = make_batches(3, [5, 1, 4]), two_updates()
    captured = capture(step, *batches[0])
    strategy = plan(captured.step, 2, 1, owners, servers=1, staleness=staleness, local_proxy=local_proxy)
    found = train(captured, strategy, batches)
    for name, value in one_device(captured, step, batches).variables[0].items():
        np.testing.assert_allclose(found.variable(name), value, rtol=1e-9, atol=1e-9, err_msg=name)


@pytest.mark.parametrize(
    "owners, local_proxy",
    [({"first": 0, "second": 0}, True), ({"first": 1, "second": 0}, False), ({"first": 2, "second": 1}, True)],
)
def test_two_asynchronous_updates_in_a_step_never_wait_for_each_other(owners, local_proxy):
    batches = make_batches(3, [5, 1, 4, 6, 2])
    captured = capture(two_updates(), *batches[0])
    strategy = plan(captured.step, 2, 1, owners, servers=1, asynchronous=True, staleness=1, local_proxy=local_proxy)
    found = train(captured, strategy, batches)
    before = {v.name: source.numpy() for v, source in zip(captured.step.variables, captured.sources, strict=True)}
    for name in owners:
        assert np.isfinite(found.variable(name)).all()
        assert (found.variable(name) != before[name]).all()
