"""Stages that recompute activations before the backward pass: the same bits, with less memory."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import tensorflow as tf

from autodist.capture.gradients import recording_gradients
from tests.unit.kernels.graphs_in_one_process import Cluster
from tests.unit.kernels.in_one_process import (
    Session,
    assert_same,
    capture,
    one_device,
    rewritten,
)
from tests.unit.kernels.pipelined import models

v1 = tf.compat.v1

COUNTS = (8, 7, 1)

CASES = [
    ("skip", 3, 4, "1F1B", 1),
    ("tied", 4, 2, "GPipe", 1),
    ("dropout", 2, 3, "1F1B", 1),
    ("draws", 2, 2, "GPipe", 1),
    ("norms", 2, 2, "GPipe", 1),
    ("recurrent", 2, 2, "GPipe", 1),
    ("running", 2, 2, "1F1B", 1),
    ("mlp", 2, 2, "1F1B", 2),
]

WRITES = {"AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp", "ResourceApplyAdam", "QueueEnqueueV2"}
DRAWS = {"RandomUniform"}


def plans(captured, stages, micro_batches, schedule, pipelines=1):
    """Returns the plans without and with recomputation."""
    lies = models.stage_of(captured, stages)
    return [
        models.pipelined(captured.step, lies, stages, micro_batches, schedule, pipelines, recompute)
        for recompute in (False, True)
    ]


def ops(items):
    return [Counter(node.op for node in step.graph_def.node) for step in items]


@pytest.mark.parametrize(("model", "stages", "micro_batches", "schedule", "pipelines"), CASES)
def test_no_bit_is_another_and_nothing_is_drawn_written_or_sent_twice(
    model, stages, micro_batches, schedule, pipelines
):
    step, given = models.made(model, "sgd"), models.batches(model, COUNTS)
    captured = capture(step, *given[0], is_global=True)
    keeping, anew = (Session(captured, p) for p in plans(captured, stages, micro_batches, schedule, pipelines))
    for kept, made in zip(ops(keeping.steps), ops(anew.steps), strict=True):
        assert made >= kept
        assert not (made - kept).keys() & (WRITES | DRAWS)
    assert sum(map(Counter.total, ops(anew.steps))) > sum(map(Counter.total, ops(keeping.steps)))
    found = anew.train(given)
    assert found.bits == keeping.train(given).bits
    if model not in models.SEEN_APART:
        assert_same(found, one_device(captured, step, given), rtol=1e-9)


STAGES, MICRO_BATCHES = 3, 4


@pytest.fixture(scope="module")
def layers():
    """A step of four layers on a batch, and the batch."""
    given = models.batches("mlp", (12,))[0]
    return capture(models.made("mlp", "sgd"), *given, is_global=True), given


def most_at_once(spans):
    return max(sum(a <= start < b for a, b in spans) for start, _ in spans)


def kept(step, when, worker, op, reader):
    """By captured layer, from when to when each value that an `op` makes is computed with, if some `reader` does so."""
    found = {}
    for node in step.graph_index.of_op(op):
        readers = [c for c in step.graph_index.consumers[node.name] if step.graph_index.nodes[c].op != "QueueEnqueueV2"]
        if any(step.graph_index.nodes[c].op == reader for c in readers):
            times = [when[f"worker_{worker}/{c}"] for c in readers]
            layer = step.replica_of(node.name)[1] if op == "Tanh" else "came in"
            found.setdefault(layer, []).append((min(a for a, _ in times), max(b for _, b in times)))
    return {layer: most_at_once(spans) for layer, spans in found.items()}


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_a_stage_keeps_what_came_into_it_and_the_layers_of_one_micro_batch(layers, schedule):
    """Counted in a trace: how many values of a layer there are at once that have still to be computed with."""
    captured, given = layers
    session = Session(captured, plans(captured, STAGES, MICRO_BATCHES, schedule)[1], models.IN_COPIES)
    when = session.trace_once(given)
    for stage, step in enumerate(session.steps):
        of_layers = kept(step, when, stage, "Tanh", "TanhGrad") | kept(step, when, stage, "Tanh", "MatMul")
        assert set(of_layers.values()) == {1}
        came = kept(step, when, stage, "QueueDequeueV2", "MatMul") if stage else {}
        most = MICRO_BATCHES if schedule == "GPipe" else STAGES - stage
        assert came == ({"came in": most} if stage else {})


def test_tensorflow_computes_anew_what_it_is_asked_to(layers):
    """Its optimizer takes no copy for the same as the original."""
    captured, given = layers
    session = Session(captured, plans(captured, STAGES, MICRO_BATCHES, "GPipe")[1], models.IN_COPIES, is_optimized=True)
    ran = session.trace_once(given)
    assert sum(name.endswith("Tanh") or "/Tanh_" in name for name in ran) == 2 * 4 * MICRO_BATCHES


def test_a_stage_that_goes_back_at_once_computes_nothing_anew(layers):
    captured, _ = layers
    keeping, anew = (rewritten(captured, p, models.IN_COPIES) for p in plans(captured, STAGES, MICRO_BATCHES, "1F1B"))
    products = [[count["MatMul"] for count in ops(items)] for items in (keeping, anew)]
    # Of a stage's two layers both are read on the way back, the last's before its activation; the last stage has two.
    assert [m - k for k, m in zip(*products, strict=True)] == [2 * MICRO_BATCHES, MICRO_BATCHES, 0]


def test_xla_computes_anew_too():
    """Copies are compiled as their originals are, and no function has both in it."""
    step, given = models.made("mlp", "sgd"), models.batches("mlp", COUNTS)
    captured = capture(step, *given[0], is_global=True, jit_compile=True)
    keeping, anew = (Session(captured, p) for p in plans(captured, 2, 3, "GPipe"))
    assert not any(node.name.startswith("autodist/recomputed/") for step in anew.steps for node in step.graph_def.node)
    assert all(
        m["StatefulPartitionedCall"] > k["StatefulPartitionedCall"]
        for k, m in zip(ops(keeping.steps), ops(anew.steps), strict=True)
    )
    assert_same(anew.train(given), one_device(captured, step, given), rtol=1e-9)


def session_of_averages():
    """A graph whose first part draws, and keeps a moving average."""
    x = v1.placeholder(tf.float64, [None, 3], "x")
    kernels = [v1.get_variable(f"part_{k}_kernel", initializer=np.full((3, 3), 0.2 * k - 0.1)) for k in (1, 2)]
    average = v1.get_variable("average", initializer=np.float64(0), trainable=False)
    h = v1.nn.dropout(tf.tanh(tf.tanh(x @ kernels[0]) @ kernels[0]), rate=0.3, seed=1)
    update = v1.assign(average, 0.9 * average + 0.1 * tf.reduce_mean(h))
    loss = tf.reduce_mean(tf.square(tf.tanh(tf.tanh(h @ kernels[1]) @ kernels[1])))
    with tf.control_dependencies([update]):
        v1.train.MomentumOptimizer(0.1, 0.9).minimize(loss, name="train")
    tf.stack([loss, average, *map(tf.reduce_sum, kernels)], name="told")


def told_by_session(recompute):
    """Returns the outputs of three steps, and the kinds of the nodes that all of them added."""
    with tf.Graph().as_default() as graph, recording_gradients(in_functions=False) as notes:
        session_of_averages()
        initializer = v1.global_variables_initializer()
    said = {"part_1_kernel": 0, "part_2_kernel": 1}, 2, 2
    cluster = Cluster(graph, notes.calls, lambda step: models.pipelined(step, *said, recompute=recompute))
    with cluster.session:
        cluster.run(targets=[initializer.name])
        batch = np.random.default_rng(0).normal(size=(7, 3))
        told = [cluster.run(["told:0"], targets=["train"], fetches_alike=True, x=batch) for _ in range(3)]
    return told, Counter(operation.type for operation in cluster.graph.get_operations())


def test_a_session_trains_the_same_bits_and_draws_and_writes_nothing_twice():
    (kept, before), (anew, after) = told_by_session(False), told_by_session(True)
    np.testing.assert_array_equal(anew, kept)
    assert (after - before).keys() >= {"MatMul", "Tanh"}
    assert not (after - before).keys() & (WRITES | DRAWS)
