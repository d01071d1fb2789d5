"""ReduceByShuffle and ParameterServers: every queue has one writer and one reader, and all workers agree on it."""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autodist.graph.inboxes import inboxes_of
from autodist.graph.names import node_of
from autodist.kernels.communicate.reduce_by_shuffle import ReduceByShuffle
from autodist.kernels.context import Context
from autodist.kernels.pipeline import KERNELS, rewrite
from tests.unit.kernels.drawn_steps import CHOICES, Choices, make_batches, make_step
from tests.unit.kernels.in_one_process import Session, assert_same, capture, one_device, plan, rewritten
from tests.unit.kernels.in_one_session import task_of_device

VARIABLES = ["table", "kernel", "gain"]
PLAIN = Choices("mean", "adam", is_tied=False, is_frozen=False, counts_steps=True)


def queues_of(step, worker):
    """Returns for each queue of a worker's graph its dtypes, shapes, device, and the worker's use of it."""
    nodes = {n.name: n for n in step.graph_def.node}
    found = {}
    for node in nodes.values():
        if node.op != "FIFOQueueV2":
            continue
        uses = [n for n in nodes.values() if node.name in map(node_of, n.input)]
        found[node.attr["shared_name"].s.decode()] = (
            tuple(node.attr["component_types"].list.type),
            tuple(str(s) for s in node.attr["shapes"].list.shape),
            node.device,
            [n.op for n in uses],
        )
        for use in uses:
            assert use.device == node.device, f"{use.name} runs where its queue is not"
            assert use.name in step.targets or _is_needed(step, use.name), f"worker {worker} need not run {use.name}"
    return found


def _is_needed(step, name):
    read = {node_of(i) for n in step.graph_def.node for i in n.input}
    return name in read


def check_queues(items):
    ends = defaultdict(list)
    for worker, step in enumerate(items):
        for name, (types, shapes, device, uses) in queues_of(step, worker).items():
            source, to = map(int, name.rsplit("/", 2)[1:])
            assert len(uses) == 1, f"worker {worker} uses {name} by {uses}"
            assert task_of_device(device) == worker, f"{name} of worker {worker} stands on {device}"
            way = "in" if "Enqueue" in uses[0] else "out"
            assert worker == (source if way == "in" else to), f"worker {worker} has the wrong end of {name}"
            ends[name].append((way, types, shapes))
    for worker, step in enumerate(items):
        for name, inbox in inboxes_of(step.graph_def).items():
            assert (inbox.source, worker) == tuple(map(int, name.rsplit("/", 2)[1:])), (
                f"{name} names its source wrongly"
            )
            assert ("out", *ends[name][0][1:]) in ends[name]
    for name, found in ends.items():
        assert Counter(way for way, *_ in found) == {"in": 1, "out": 1}, f"{name} has the ends {found}"
        assert found[0][1:] == found[1][1:], f"the ends of {name} differ: {found}"
    return ends


@settings(max_examples=5, suppress_health_check=[HealthCheck.too_slow])
@given(
    choices=CHOICES,
    workers=st.integers(2, 3),
    owners=st.dictionaries(st.sampled_from(VARIABLES), st.integers(0, 2)),
)
def test_every_outbox_has_one_source_and_its_inbox_one_reader(choices, workers, owners):
    captured = capture(make_step(choices), *make_batches(0, [4])[0])
    strategy = plan(captured.step, workers, 1, {name: owner % workers for name, owner in owners.items()})
    check_queues(rewritten(captured, strategy))


def test_one_worker_has_no_queues():
    captured = capture(make_step(PLAIN), *make_batches(0, [4])[0])
    (step,) = rewritten(captured, plan(captured.step, 1, 3))
    assert not queues_of(step, 0)
    assert ReduceByShuffle().apply(step, Context(plan(captured.step, 1, 3), 0)) is step


def test_the_same_step_is_rewritten_to_the_same_bytes():
    captured = capture(make_step(PLAIN), *make_batches(0, [4])[0])
    strategy = plan(captured.step, 2, 2, {"kernel": 1})
    first, second = rewritten(captured, strategy), rewritten(captured, strategy)
    for one, other in zip(first, second, strict=True):
        assert [n.SerializeToString(deterministic=True) for n in one.graph_def.node] == [
            n.SerializeToString(deterministic=True) for n in other.graph_def.node
        ]
        assert (one.targets, one.outputs) == (other.targets, other.outputs)


@pytest.mark.parametrize("bucket_bytes", [1, 100])
def test_buckets_of_any_size_give_the_same_numbers(bucket_bytes, monkeypatch):
    monkeypatch.setattr("autodist.kernels.communicate.communicator.DIRECT_BYTES", 50)
    step, data = make_step(PLAIN), make_batches(2, [5, 2])
    captured = capture(step, *data[0])
    kernels = tuple(ReduceByShuffle(bucket_bytes) if isinstance(k, ReduceByShuffle) else k for k in KERNELS)
    strategy = plan(captured.step, 3)
    session = Session(captured, strategy, kernels)
    check_queues(session.steps)
    assert_same(session.train(data), one_device(captured, step, data))


def test_buckets_that_grow_with_the_workers_give_the_same_bits(monkeypatch):
    monkeypatch.setattr("autodist.kernels.communicate.communicator.DIRECT_BYTES", 50)
    step, data = make_step(PLAIN), make_batches(2, [5, 2])
    captured = capture(step, *data[0])
    kernels = tuple(ReduceByShuffle(100) if isinstance(k, ReduceByShuffle) else k for k in KERNELS)
    strategy = plan(captured.step, 3)
    small = Session(captured, strategy, kernels).train(data)
    monkeypatch.setattr("autodist.kernels.communicate.reduce_by_shuffle.EVENLY_CUT", 1)
    grown = Session(captured, strategy, kernels).train(data)
    for name in small.variables[0]:
        np.testing.assert_array_equal(grown.variable(name), small.variable(name), err_msg=name)


def test_with_more_workers_there_are_fewer_buckets(monkeypatch):
    monkeypatch.setattr("autodist.kernels.communicate.communicator.DIRECT_BYTES", 0)
    captured = capture(make_step(PLAIN), *make_batches(0, [4])[0])
    before = KERNELS[: [isinstance(k, ReduceByShuffle) for k in KERNELS].index(True)]

    def pieces(workers):
        context = Context(plan(captured.step, workers), 1)
        step = rewrite(captured.step, context, kernels=(*before, ReduceByShuffle(50)))
        return Counter(name.split("/")[0] for name in queues_of(step, 1) if "/piece/" in name)

    few, many = pieces(16), pieces(32)
    assert set(few.values()) == {2 * 15} and set(many.values()) == {2 * 31}
    assert len(many) < len(few)


def test_small_state_and_small_gradients_share_buckets():
    """A queue for every variable would cost a round trip each."""
    step = make_step(PLAIN)
    captured = capture(step, *make_batches(0, [4])[0])
    sources = {name.partition("/")[0] for name in check_queues(rewritten(captured, plan(captured.step, 2)))}
    assert len(sources) == 2  # the table's rows; the dense gradients and the loss


def test_averages_of_many_layers_share_one_bucket():
    norms = [tf.Variable(tf.zeros(3, tf.float64), name=f"average_{k}", trainable=False) for k in range(5)]
    weight = tf.Variable(tf.ones((4, 3), tf.float64), name="w")

    def step(x):
        with tf.GradientTape() as tape:
            hidden = x @ weight
            loss = tf.reduce_mean(tf.square(hidden))
        for norm in norms:
            norm.assign(0.9 * norm + 0.1 * tf.reduce_mean(hidden, 0))
        weight.assign_sub(0.1 * tape.gradient(loss, weight))
        return loss

    captured = capture(step, make_batches(0, [4])[0][1].repeat(2, 1))
    sources = {name.partition("/")[0] for name in check_queues(rewritten(captured, plan(captured.step, 2)))}
    assert len(sources) == 1  # the gradient, the averages and the loss


def test_a_reduction_does_not_share_a_bucket_with_one_that_it_waits_for():
    weight = tf.Variable(tf.ones(3, tf.float64), name="w")
    slope = tf.Variable(tf.ones([], tf.float64), name="slope")

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(x @ tf.reshape(weight, [3, 1]))
        weight.assign_sub(0.1 * tape.gradient(loss, weight))
        with tf.GradientTape() as tape:
            loss = slope * tf.reduce_mean(x @ tf.reshape(weight, [3, 1]))
        slope.assign_sub(0.1 * tape.gradient(loss, slope))
        return loss

    captured = capture(step, np.ones((4, 3)))
    items = rewritten(captured, plan(captured.step, 2))
    sources = {name.partition("/")[0] for name in check_queues(items)}
    assert len(sources) == 2  # the gradient of the weight; that of the slope and the loss, which need the new weight
