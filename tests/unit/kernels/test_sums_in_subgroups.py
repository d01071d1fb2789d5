"""Reductions in subgroups equal one device's, with the same bits on all workers, in few messages."""

from __future__ import annotations

from math import sqrt

import numpy as np
import pytest
import tensorflow as tf

from autodist.graph.names import node_of
from autodist.kernels import Context, rewrite
from autodist.placement.group import Group
from autodist.proto import strategy_pb2
from autodist.synchronizers import Subgroups
from tests.unit.kernels.communicate.test_reduce_by_shuffle import check_queues
from tests.unit.kernels.in_one_process import Session, assert_same, capture, one_device, plan
from tests.unit.kernels.in_one_session import partners_of

TEAMS = {
    "4": [0, 0, 1, 1],
    "5": [0, 0, 0, 1, 1],
    "6": [0, 1, 2, 0, 1, 2],
    "7": [0, 0, 0, 1, 1, 2, 2],
    "9": [0, 0, 0, 1, 1, 1, 2, 2, 2],
    "one apart": [0, 0, 0, 0, 1],
    "servers": [0, 0, 1, 1, 1, 0, 1],
}
SERVERS = {"servers": 2}
WHOLE = 64
"""Bytes up to which a bucket goes whole: a loss does, the kernel's gradient goes in pieces, which are cut again."""


def planned(step, subgroups, servers=0, spec="HIERARCHICAL", **options):
    strategy = plan(step, len(subgroups) - servers, servers=servers, **options)
    strategy.graph_config.subgroups[:] = subgroups
    for node in strategy.nodes:
        if node.HasField("all_reduce"):
            node.all_reduce.spec = strategy_pb2.AllReduce.Spec.Value(spec)
    return strategy


def make_step():
    """Rows of a table, a kernel, an average that the step keeps, and two losses."""
    rng = np.random.default_rng(1)
    table = tf.Variable(rng.normal(size=(7, 4)), name="table")
    kernel = tf.Variable(rng.normal(size=(4, 12)), name="kernel")
    average = tf.Variable(np.zeros(4), name="average", trainable=False)

    def step(ids, targets):
        with tf.GradientTape() as tape:
            rows = tf.gather(table, ids)
            error = tf.square(tf.tanh(rows @ kernel) - targets)
            loss = tf.reduce_mean(error)
        rows_of_table, whole = tape.gradient(loss, [table, kernel])
        scaled = tf.IndexedSlices(-0.1 * rows_of_table.values, rows_of_table.indices)
        table.scatter_add(scaled)
        kernel.assign_sub(0.1 * whole)
        average.assign(0.9 * average + 0.1 * tf.reduce_mean(rows, 0))
        return loss

    return step


def batches(*sizes):
    rng = np.random.default_rng(2)
    return [(rng.integers(0, 7, n, np.int32), rng.normal(size=(n, 12))) for n in sizes]


@pytest.fixture(scope="module")
def step():
    return make_step()


@pytest.fixture(scope="module")
def captured(step):
    return capture(step, *batches(4)[0])


@pytest.mark.parametrize(
    ("name", "least"),
    [("5", WHOLE), ("6", WHOLE), ("7", WHOLE), ("one apart", None), ("servers", WHOLE)],
)
def test_a_step_trains_as_on_one_device(name, least, step, captured, monkeypatch):
    if least is not None:
        monkeypatch.setattr("autodist.kernels.communicate.communicator.DIRECT_BYTES", least)
    data = batches(11, 4)  # fewer examples than workers
    session = Session(captured, planned(captured.step, TEAMS[name], SERVERS.get(name, 0)))
    check_queues(session.steps)
    assert_same(session.train(data), one_device(captured, step, data), rtol=1e-9)


def test_beside_a_parameter_server_a_step_trains_as_on_one_device(step, captured):
    data = batches(9)
    strategy = planned(captured.step, TEAMS["4"], owners={"table": 2})
    assert_same(Session(captured, strategy).train(data), one_device(captured, step, data), rtol=1e-9)


def test_values_sent_to_all_workers_are_those_without_subgroups(captured):
    def trained(subgroups):
        strategy = planned(captured.step, TEAMS["4"])
        strategy.graph_config.subgroups[:] = subgroups
        for node in strategy.nodes:
            if node.variable == "kernel":
                node.all_reduce.compressor.CopyFrom(
                    strategy_pb2.Compressor(error_feedback=True, kind="TOP_K", fraction=0.3)
                )
        return Session(captured, strategy).train(batches(10, 10))

    subgroups, alone = trained(TEAMS["4"]), trained([])
    np.testing.assert_array_equal(subgroups.variable("kernel"), alone.variable("kernel"))


@pytest.mark.parametrize("workers", [9, 16])
def test_messages_and_calls_grow_with_the_root_of_the_workers(workers, captured, monkeypatch):
    monkeypatch.setattr("autodist.kernels.communicate.communicator.DIRECT_BYTES", WHOLE)
    root = int(sqrt(workers))
    strategy = planned(captured.step, [worker // root for worker in range(workers)])
    step = rewrite(captured.step, Context(strategy, 1))
    nodes = {node.name: node for node in step.graph_def.node}
    puts = [node for node in nodes.values() if node.op == "QueueEnqueueV2"]
    shared = [nodes[node_of(node.input[0])].attr["shared_name"].s.decode() for node in puts]
    buckets = {name.partition("/")[0] for name in shared}
    called = partners_of(step)
    assert (
        len(called)
        == 2 * (root - 1)
        == Subgroups.of(strategy.graph_config.subgroups, Group.of_workers(range(workers))).most_called
    )
    assert len(puts) <= 4 * len(buckets) * root


def test_small_sums_travel_in_the_same_messages(captured):
    step = rewrite(captured.step, Context(planned(captured.step, TEAMS["9"]), 1))
    whole = [name for name in _queues(step) if "/whole/" in name]
    assert len({name.partition("/")[0] for name in whole}) == 1


def _queues(step):
    return [n.attr["shared_name"].s.decode() for n in step.graph_def.node if n.op == "FIFOQueueV2"]
