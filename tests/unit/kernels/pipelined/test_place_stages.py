"""Pipeline stages train, bit for bit, as their micro-batches do as replicas of one worker."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from autodist.errors import FetchedElsewhereError, StrategyError
from autodist.kernels import Context, Fetching, rewrite
from tests.unit.kernels.in_one_process import Session, assert_same, capture, one_device, plan, rewritten, train
from tests.unit.kernels.in_one_session import readers_of
from tests.unit.kernels.pipelined import models

CASES = [
    ("mlp", 4, 3, "1F1B", "norm"),
    ("mlp", 3, 1, "GPipe", "adam"),
    ("skip", 3, 4, "1F1B", "adam"),
    ("tied", 4, 2, "GPipe", "sgd"),
    ("dropout", 2, 3, "1F1B", "adam"),
    ("recurrent", 4, 2, "GPipe", "sgd"),
    ("normalised", 2, 3, "1F1B", "adam"),
    ("running", 4, 2, "GPipe", "sgd"),
]
COUNTS = (8, 7, 1)


def assert_same_bits(found, expected):
    for name, value in expected.variables[0].items():
        np.testing.assert_array_equal(found.variable(name), value, err_msg=name)
    for outputs, (wanted,) in zip(found.outputs, expected.outputs, strict=True):
        for mine in outputs:
            for one, other in zip(mine, wanted, strict=True):
                np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(("model", "stages", "micro_batches", "schedule", "optimizer"), CASES)
def test_a_pipeline_trains_the_bits_of_as_many_replicas_and_what_one_device_trains(
    model, stages, micro_batches, schedule, optimizer
):
    step, given = models.made(model, optimizer), models.batches(model, COUNTS)
    found, alone, captured = models.trained(step, given, stages, micro_batches, schedule)
    assert_same_bits(found, alone)
    if model not in models.SEEN_APART:
        assert_same(found, one_device(captured, step, given), rtol=1e-9)
    slots = [{name for name in values if "part_" in name} for values in found.variables]
    assert all(slots)
    assert sum(map(len, slots)) == len(set().union(*slots))  # each is held by one worker


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_each_worker_computes_its_own_layers_alone_and_activations_and_their_gradients_travel(schedule):
    captured = capture(models.made("mlp", "sgd"), *models.batches("mlp", (8,))[0], is_global=True)
    items = rewritten(captured, models.pipelined(captured.step, models.stage_of(captured, 4), 4, 2, schedule))
    products = [len(step.graph_index.of_op("MatMul")) for step in items]
    assert products == [2 * 2, 2 * 3, 2 * 3, 2 * 3]  # forward and both ways back; the first needs no gradient of x
    sent = {(worker, reader) for worker, item in enumerate(items) for reader in readers_of(item).values()}
    kernels = {
        worker: sum(len(n.attr["Tcomponents"].list.type) for n in item.graph_index.of_op("QueueEnqueueV2"))
        for worker, item in enumerate(items)
    }
    assert {(1, 2), (2, 3), (2, 1), (3, 2)} <= sent
    assert max(kernels.values()) < 30


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_a_stage_keeps_the_activations_of_all_micro_batches_by_gpipe_and_of_as_many_as_stages_follow_by_1f1b(schedule):
    """Counted in a trace: how many outputs of a layer there are at once that a gradient has still to read."""
    stages, micro_batches = 3, 6
    given = models.batches("mlp", (12,))[0]
    captured = capture(models.made("mlp", "sgd"), *given, is_global=True)
    strategy = models.pipelined(captured.step, models.stage_of(captured, stages), stages, micro_batches, schedule)
    session = Session(captured, strategy, models.IN_COPIES)
    when = session.trace_once(given)
    for stage, step in enumerate(session.steps):
        layers = {}
        for made in step.graph_index.of_op("Tanh"):
            (read,) = (c for c in step.graph_index.consumers[made.name] if step.graph_index.nodes[c].op == "TanhGrad")
            (_, start), (end, _) = (when[f"worker_{stage}/{name}"] for name in (made.name, read))
            layers.setdefault(step.replica_of(made.name)[1], []).append((start, end))
        kept = [max(sum(a <= start < b for a, b in spans) for start, _ in spans) for spans in layers.values()]
        most = micro_batches if schedule == "GPipe" else stages - stage
        assert layers
        assert set(map(len, layers.values())) == {micro_batches}
        assert set(kept) == {most}


def test_rows_and_means_that_a_step_returns_come_to_every_worker():
    kernels = [tf.Variable(np.full((3, 3), 0.1 * k), name=f"part_{k}_kernel") for k in (1, 2)]

    def step(x):
        with tf.GradientTape() as tape:
            rows = tf.tanh(tf.tanh(x @ kernels[0]) @ kernels[1])
            loss = tf.reduce_mean(rows)
        for kernel, gradient in zip(kernels, tape.gradient(loss, kernels), strict=True):
            kernel.assign_sub(gradient)
        return loss, rows, tf.reduce_sum(kernels[1])

    given = [[np.random.default_rng(0).normal(size=(count, 3))] for count in (5, 2)]
    captured = capture(step, *given[0], is_global=True)
    strategy = models.pipelined(captured.step, {"part_1_kernel": 0, "part_2_kernel": 1}, 2, 2)
    assert_same(train(captured, strategy, given), one_device(captured, step, given))


def test_steps_that_do_not_train_run_in_the_stages_too():
    kernels = [tf.Variable(np.full((3, 3), 0.1 * k), name=f"part_{k}_kernel") for k in (1, 2)]
    trained = capture(models.of_two_kernels(kernels), np.ones((1, 3)))

    def predict(x):
        return tf.tanh(tf.tanh(x @ kernels[0]) @ kernels[1])

    given = [[np.random.default_rng(0).normal(size=(5, 3))]]
    captured = capture(predict, *given[0], is_global=True, is_whole=True)
    strategy = models.pipelined(trained.step, {"part_1_kernel": 0, "part_2_kernel": 1}, 2, 2)
    found = Session(captured, strategy)
    assert [len(step.graph_index.of_op("MatMul")) for step in found.steps] == [2, 2]
    assert_same(found.train(given), one_device(captured, predict, given))


def test_a_run_whose_workers_may_fetch_different_things_is_refused():
    kernels = [tf.Variable(np.eye(3), name=f"part_{k}_kernel") for k in (1, 2)]
    captured = capture(models.of_two_kernels(kernels), np.ones((1, 3)))
    strategy = models.pipelined(captured.step, {"part_1_kernel": 0, "part_2_kernel": 1}, 2, 2)
    with pytest.raises(FetchedElsewhereError, match="not all workers fetch it"):
        rewrite(captured.step, Context(strategy, 0, Fetching.BY_EACH))
    rewrite(captured.step, Context(strategy, 0, Fetching.BY_ALL))


def test_a_value_of_all_micro_batches_is_refused_if_the_schedule_does_not_allow_it():
    """The loss is divided by a number that the last stage makes of all examples."""
    kernels = [tf.Variable(np.eye(3), name=f"part_{k}_kernel") for k in (1, 2)]

    def step(x):
        with tf.GradientTape() as tape:
            rows = tf.tanh(x @ kernels[0]) @ kernels[1]
            used = tf.cast(tf.stop_gradient(rows) > 0.0, tf.float64)
            loss = tf.reduce_sum(rows * used) / tf.reduce_sum(used)
        for kernel, gradient in zip(kernels, tape.gradient(loss, kernels), strict=True):
            kernel.assign_sub(gradient)
        return loss

    given = [[np.random.default_rng(0).normal(size=(5, 3))]]
    captured = capture(step, *given[0], is_global=True)
    stage_of = {"part_1_kernel": 0, "part_2_kernel": 1}
    with pytest.raises(StrategyError, match="wait for each other.*Set schedule: GPipe"):
        rewritten(captured, models.pipelined(captured.step, stage_of, 2, 3, "1F1B"))
    by_gpipe = models.pipelined(captured.step, stage_of, 2, 3, "GPipe")
    assert_same_bits(train(captured, by_gpipe, given), train(captured, plan(captured.step, 1, 3), given))
    assert_same(train(captured, by_gpipe, given), one_device(captured, step, given))


def test_assertions_on_a_later_loss_run_in_the_later_stage_and_labels_wait_for_nothing():
    """The losses of sequences reshape labels once it is asserted that they have the logits' shape."""
    kernels = [tf.Variable(np.full((3, 3), 0.1 * k), name=f"part_{k}_kernel") for k in (1, 2)]

    def step(x, y):
        with tf.GradientTape() as tape:
            logits = tf.tanh(x @ kernels[0]) @ kernels[1]
            is_small = tf.reduce_max(logits) < 9.0
            with tf.control_dependencies([tf.raw_ops.Assert(condition=is_small, data=[logits])]):
                labels = tf.reshape(y, [-1])
            rows = tf.reshape(logits, [-1, 3])
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=rows))
        for kernel, gradient in zip(kernels, tape.gradient(loss, kernels), strict=True):
            kernel.assign_sub(gradient)
        return loss

    draw = np.random.default_rng(0)
    given = [[draw.normal(size=(count, 4, 3)), draw.integers(0, 3, (count, 4))] for count in (5, 2)]
    captured = capture(step, *given[0], is_global=True)
    strategy = models.pipelined(captured.step, {"part_1_kernel": 0, "part_2_kernel": 1}, 2, 2, "1F1B")
    assert_same(train(captured, strategy, given), one_device(captured, step, given))
    first, last = rewritten(captured, strategy)
    assert (len(first.graph_index.of_op("Assert")), len(last.graph_index.of_op("Assert"))) == (0, 2)
