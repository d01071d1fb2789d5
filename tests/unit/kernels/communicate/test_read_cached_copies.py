"""Cached copies change the source of replicas' reads, and no trained value."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import tensorflow as tf

from autodist.graph.editor import GraphEditor
from autodist.graph.effects import Effects
from autodist.graph.names import node_of
from autodist.graph.parts import Variable
from autodist.graph.step import PlacedStep
from autodist.kernels import SETTING_KERNELS, Context, Fetching, rewrite
from autodist.kernels.communicate import value_messages
from autodist.kernels.plan import CACHED_COPY
from autodist.placement.holder import Copy
from autodist.placement.partitioning import Partitioning
from tests.unit.kernels.communicate.test_asynchronous_servers import expected, linear_batches
from tests.unit.kernels.communicate.test_asynchronous_servers import linear_step as plain_linear_step
from tests.unit.kernels.communicate.test_stale_servers import assert_trains_as_one_device
from tests.unit.kernels.drawn_steps import Choices, make_batches, make_step, on_one_device
from tests.unit.kernels.in_one_process import (
    assert_same,
    capture,
    capture_one_weight,
    one_device,
    plan,
    rewritten,
    train,
)
from tests.unit.kernels.in_one_session import task_of_device, workers_of
from tests.unit.kernels.pairs import pairs
from tests.unit.kernels.place.partition.shards import cut_in_strategy
from tests.unit.placement.holders import held_by

OWNED = ("table", "kernel", "gain")
OWNERS = {
    "one owner": dict.fromkeys(OWNED, 1),
    "three owners": {"table": 0, "kernel": 1, "gain": 2},
    "mixed": {"table": 0, "gain": 1},
}
PACES = [
    *((owners, {}) for owners in sorted(OWNERS)),
    *(
        (owners, options)
        for owners in ("one owner", "three owners")
        for options in ({"staleness": 2}, {"asynchronous": True, "staleness": 1})
    ),
]


@pytest.mark.parametrize("optimizer, owners", pairs(["momentum", "adamw", "global norm", "average"], OWNERS))
def test_training_is_that_of_one_device(optimizer, owners):
    choices = Choices("mean", optimizer, is_tied=True, is_frozen=False, counts_steps=True)
    captured, batches, alone = on_one_device(choices, 7, (5, 2, 4))
    strategy = plan(captured.step, 2, 2, OWNERS[owners], servers=1, local_proxy=True)
    assert_same(train(captured, strategy, batches), alone, rtol=1e-9)


def test_every_gradient_counts_under_asynchronous_servers():
    batches = linear_batches([7, 4, 1, 9])
    captured = capture(plain_linear_step(), *batches[0])
    strategy = plan(captured.step, 3, 1, {"table": 0, "kernel": 1}, asynchronous=True, local_proxy=True)
    trained = train(captured, strategy, batches)
    for name, value in expected(batches, 3).items():
        np.testing.assert_allclose(trained.variable(name), value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("optimizer", ["adamw", "global norm"])
def test_updates_are_those_of_one_device_under_staleness(optimizer):
    assert_trains_as_one_device(
        optimizer, lambda step: plan(step, 2, 1, OWNERS["one owner"], staleness=2, local_proxy=True)
    )


@pytest.mark.parametrize("options", [{}, {"asynchronous": True}, {"staleness": 1}])
def test_gradients_wait_for_no_read_from_another_worker(options):
    captured = capture(make_step(Choices("mean", "adam", True, False, False)), *make_batches(1, [2])[0])
    strategy = plan(captured.step, 2, 1, dict.fromkeys(OWNED, 1), local_proxy=True, **options)
    step = rewritten(captured, strategy)[0]
    editor = GraphEditor(step.graph_def)
    loss = editor.ancestors(map(node_of, step.outputs))
    far = {name for name in loss if editor[name].device and task_of_device(editor[name].device) != 0}
    assert not {name for name in far if editor[name].op in ("ReadVariableOp", "ResourceGather")}
    is_stale = "staleness" in options
    assert any(name.endswith("/refresh") for name in step.targets) != is_stale
    in_background = editor.ancestors(step.background_nodes)
    assert any(name.rsplit("/", 1)[-1].startswith("refresh") for name in in_background) == is_stale
    assert {name for name, holder in step.holders.items() if holder.slices[0].copies} == set(OWNED)


def test_the_owner_of_synchronous_variables_reads_these_themselves():
    captured = capture(make_step(Choices("mean", "sgd", False, False, False)), *make_batches(1, [2])[0])
    strategy = plan(captured.step, 2, 1, dict.fromkeys(OWNED, 1), local_proxy=True)
    assert not any("cached_copy" in node.name for node in rewrite(captured.step, Context(strategy, 1)).graph_def.node)


@pytest.mark.parametrize("local_proxy", [False, True])
def test_values_that_a_session_sets_reach_the_cached_copies(local_proxy):
    captured = capture(make_step(Choices("mean", "sgd", False, False, False)), *make_batches(1, [2])[0])
    strategy = plan(captured.step, 3, 1, dict.fromkeys(OWNED, 1), local_proxy=local_proxy)
    with tf.Graph().as_default() as graph:
        handle = tf.raw_ops.VarHandleOp(dtype=tf.float64, shape=[], shared_name="session/gain", name="gain")
        tf.raw_ops.AssignVariableOp(resource=handle, value=tf.constant(2.0, tf.float64), name="set")
    variable = Variable("gain", "gain", (), tf.float64, trainable=True)
    setting = PlacedStep(graph.as_graph_def(), (variable,), targets=("set",), holders={"gain": held_by((), [1])})
    step = rewrite(setting, Context(strategy, 0, Fetching.BY_EACH), kernels=SETTING_KERNELS)
    effects = Effects(step.graph_def)
    written = {h for node in step.graph_def.node for h in effects.of(node).writes}
    places = {
        (task_of_device(node.device), node.attr["shared_name"].s) for node in step.graph_def.node
        if node.name in written
    }  # fmt: skip
    proxies = {(worker, b"session/gain/cached_copy") for worker in (0, 2)} if local_proxy else set()
    assert places == {(1, b"session/gain")} | proxies


@cache
def captured_with(optimizer):
    return capture(make_step(Choices("mean", optimizer, True, False, True)), *make_batches(1, [2])[0])


@pytest.mark.parametrize("pace, optimizer", pairs(PACES, ["sgd", "global norm"], each=2))
def test_a_training_step_names_no_other_worker(pace, optimizer):
    """Nothing but messages crosses between workers, the optimizer's slots included."""
    owners, options = pace
    captured = captured_with(optimizer)
    strategy = plan(captured.step, 2, 1, OWNERS[owners], servers=1, local_proxy=True, **options)
    for worker, step in enumerate(rewritten(captured, strategy)):
        assert workers_of(step) == {worker}


def test_the_replicas_of_a_worker_share_one_read_of_a_copy_that_may_change_at_any_time():
    captured = capture_one_weight()
    step = rewritten(captured, plan(captured.step, 2, 2, {"weight": 1}, local_proxy=True, staleness=1))[0]
    (copy,) = [node.name for node in step.graph_def.node if CACHED_COPY in node.attr["shared_name"].s.decode()]
    reads = [node.name for node in step.graph_def.node if node.op == "ReadVariableOp" and copy in node.input]
    assert len(reads) == 1


def test_a_worker_reads_no_slot_that_its_owner_alone_uses():
    captured = capture(make_step(Choices("mean", "adam", False, False, False)), *make_batches(1, [2])[0])
    strategy = plan(captured.step, 2, 1, dict.fromkeys(OWNED, 1))
    step = rewritten(captured, strategy)[0]
    handles = {v.handle for v in step.variables if "momentum" in v.name or "velocity" in v.name}
    assert handles
    assert not any(handles & {node_of(i) for i in node.input} for node in step.graph_def.node)


def test_values_share_messages_up_to_a_size(monkeypatch):
    monkeypatch.setattr(value_messages, "PACK_BYTES", 20)
    choices = Choices("mean", "adam", is_tied=True, is_frozen=False, counts_steps=True)
    captured, batches, alone = on_one_device(choices, 7, (5, 2, 4))
    strategy = plan(captured.step, 2, 1, OWNERS["one owner"], local_proxy=True)
    sent = [node for node in rewritten(captured, strategy)[0].graph_def.node if "/values/" in str(node.attr)]
    assert len(sent) > 1
    assert_same(train(captured, strategy, batches), alone, rtol=1e-9)


def test_an_evaluation_reads_the_copies():
    training = capture_one_weight()
    (weight,) = training.sources
    strategy = plan(training.step, 2, 1, {"weight": 1}, local_proxy=True)
    evaluation = capture(lambda x: tf.reduce_mean(x * weight), np.ones((1, 2)))
    for worker, reading in enumerate(rewritten(evaluation, strategy)):
        assert workers_of(reading) == {worker}


def test_a_loop_that_takes_a_partitioned_variable_reads_the_copies_of_its_shards():
    weight = tf.Variable(np.eye(4), name="weight")

    def step(x):
        with tf.GradientTape() as tape:
            _, last = tf.while_loop(lambda k, _: k < 3, lambda k, y: (k + 1, tf.tanh(y @ weight)), (0, x))
            loss = tf.reduce_mean(last)
        weight.assign_sub(tape.gradient(loss, weight))
        return loss

    batches = [(np.linspace(-1.0, 1.0, 8 * (k + 1)).reshape(-1, 4),) for k in range(3)]
    captured = capture(step, *batches[0])
    strategy = plan(captured.step, 2, 1, {"weight": 0})
    cut_in_strategy(strategy, "weight", Partitioning(0, (1, 3)), (0, 1))
    for shard in strategy.nodes[0].shards:
        shard.parameter_server.local_proxy = True
    assert any("While" in node.op for node in captured.step.graph_def.node)
    for worker, reading in enumerate(rewritten(captured, strategy)):
        assert workers_of(reading) == {worker}
    assert_same(train(captured, strategy, batches), one_device(captured, step, batches))


def test_a_step_that_its_strategy_does_not_cover_refreshes_the_copies_that_other_steps_read():
    weight = tf.Variable(np.ones(2), name="weight")
    captured = capture(lambda: weight.assign(weight * 0.5))
    holder = held_by((2,), [1]).with_copies("weight", {"weight": [Copy(CACHED_COPY)]})
    placed = replace(captured.step, holders={"weight": holder})
    empty = plan(captured.step, 2, 1)
    assert not empty.nodes
    for worker in range(2):
        step = rewrite(placed, Context(empty, worker))
        written = {n for name, e in step.graph_index.effects.items() if name in step.targets for n in e.writes}
        names = {step.graph_index.nodes[handle].attr["shared_name"].s.decode() for handle in written}
        assert any(name.endswith(CACHED_COPY) for name in names)
        assert workers_of(step) == {worker}
