"""Data-parallel pipelines: each runs a part of the batch; together they train as replicas of all micro-batches."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import tensorflow as tf

from autodist.capture.gradients import recording_gradients
from autodist.graph.walks import reach
from tests.unit.kernels.graphs_in_one_process import Cluster
from tests.unit.kernels.in_one_process import assert_same, capture, one_device, rewritten, train
from tests.unit.kernels.in_one_session import readers_of
from tests.unit.kernels.pipelined import models
from tests.unit.kernels.pipelined.test_place_stages import assert_same_bits

v1 = tf.compat.v1

COUNTS = (8, 7, 1)
"""Of examples, which are fewer than the micro-batches in the last: then whole pipelines have none."""

CASES = [
    ("mlp", 2, 2, 2, "1F1B", "norm"),
    ("skip", 2, 2, 3, "GPipe", "sgd"),
    ("dropout", 2, 2, 2, "1F1B", "sgd"),
]


@pytest.mark.parametrize(("model", "stages", "micro_batches", "pipelines", "schedule", "optimizer"), CASES)
def test_pipelines_side_by_side_train_what_all_their_micro_batches_do_as_replicas_of_one_worker(
    model, stages, micro_batches, pipelines, schedule, optimizer
):
    step, given = models.made(model, optimizer), models.batches(model, COUNTS)
    found, alone, captured = models.trained(step, given, stages, micro_batches, schedule, pipelines)
    assert_same(found, alone)  # to 1e-12: sums of more than two are made in another order
    if model not in models.SEEN_APART:
        assert_same(found, one_device(captured, step, given), rtol=1e-9)
    held = [{name for name in values if "part_" in name} for values in found.variables]
    for stage in range(stages):
        stage_group = held[stage * pipelines : (stage + 1) * pipelines]
        assert all(stage_group) and all(one == stage_group[0] for one in stage_group)
    assert sum(map(len, held[::pipelines])) == len(set().union(*held))  # and no other stage holds it


def test_pipelines_of_one_micro_batch_train_the_bits_of_as_many_replicas():
    step, given = models.made("tied", "sgd"), models.batches("tied", COUNTS)
    found, alone, captured = models.trained(step, given, 2, 1, "GPipe", pipelines=3)
    assert_same_bits(found, alone)
    assert_same(found, one_device(captured, step, given), rtol=1e-9)


def test_into_how_many_stages_pipelines_are_cut_changes_no_bit():
    given = models.batches("mlp", COUNTS)
    captured = capture(models.made("mlp"), *given[0], is_global=True)
    cut, whole = (
        train(captured, models.pipelined(captured.step, models.stage_of(captured, n), n, 2, "1F1B", 2), given)
        for n in (2, 1)
    )
    for name in set().union(*whole.variables):
        np.testing.assert_array_equal(cut.variable(name), whole.variable(name), err_msg=name)
    assert str(cut.outputs) == str([[mine[0]] * 4 for mine in whole.outputs])


def test_a_worker_computes_its_own_pipelines_micro_batches_and_sends_each_gradient_to_a_mate_once():
    captured = capture(models.made("mlp", "sgd"), *models.batches("mlp", (8,))[0], is_global=True)
    strategy = models.pipelined(captured.step, models.stage_of(captured, 2), 2, 3, "GPipe", pipelines=2)
    items = rewritten(captured, strategy)
    assert [len(step.graph_index.of_op("MatMul")) for step in items] == [3 * 5, 3 * 5, 3 * 6, 3 * 6]
    for worker, item in enumerate(items):
        to_mate = [name for name, reader in readers_of(item).items() if reader == worker ^ 1]
        messages = reach(to_mate, partial(_packing_before, item))
        sums = [name for name in messages if name.startswith("autodist/gradient/")]
        assert len(sums) == 4  # two kernels and two biases
        packing = [s for name in messages for s in item.graph_index.data[name] if s in sums and name not in sums]
        assert sorted(packing) == sorted(sums)  # each once


def _packing_before(item, name):
    """The nodes that a node of a message takes its values from."""
    return item.graph_index.data[name] if name.startswith("autodist/pipeline/") else ()


def test_a_value_set_between_steps_is_set_on_all_holders_and_each_reads_its_own_pipeline():
    with tf.Graph().as_default() as graph, recording_gradients(in_functions=False) as notes:
        x = v1.placeholder(tf.float64, [None, 3], "x")
        kernels = [v1.get_variable(f"part_{k}_kernel", initializer=np.full((3, 3), 0.1 * k)) for k in (1, 2)]
        loss = tf.reduce_mean(tf.tanh(tf.tanh(x @ kernels[0]) @ kernels[1]))
        v1.train.GradientDescentOptimizer(0.1).minimize(loss)
        values = [kernel.read_value() for kernel in kernels]
        initializer = v1.global_variables_initializer()
    stage_of = {"part_1_kernel": 0, "part_2_kernel": 1}
    cluster = Cluster(graph, notes.calls, lambda step: models.pipelined(step, stage_of, 2, 2, pipelines=2))
    assert {name: holder.slices[0].group.workers for name, holder in cluster.holders.items()} == {
        "part_1_kernel": (0, 1), "part_2_kernel": (2, 3)
    }  # fmt: skip
    with cluster.session:
        cluster.run(targets=[initializer.name])
        for found in cluster.run([value.name for value in values], fetches_alike=True):
            for k, value in enumerate(found, start=1):
                np.testing.assert_array_equal(value, np.full((3, 3), 0.1 * k))


def test_rows_and_what_does_not_train_go_through_all_pipelines():
    kernels = [tf.Variable(np.full((3, 3), 0.1 * k), name=f"part_{k}_kernel") for k in (1, 2)]
    trained = capture(models.of_two_kernels(kernels), np.ones((1, 3)))

    def predict(x):
        return tf.tanh(tf.tanh(x @ kernels[0]) @ kernels[1])

    given = [[np.random.default_rng(0).normal(size=(count, 3))] for count in (5, 2)]
    captured = capture(predict, *given[0], is_global=True, is_whole=True)
    strategy = models.pipelined(trained.step, {"part_1_kernel": 0, "part_2_kernel": 1}, 2, 2, pipelines=2)
    assert_same(train(captured, strategy, given), one_device(captured, predict, given))
