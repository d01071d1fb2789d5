"""Computation and communication of stages: counted by hand for models of 5-by-5 matrices in float64."""

from __future__ import annotations

import io
import logging
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
import rich.console
import tensorflow as tf

from autodist.capture.function import capture_function
from autodist.graph.partial_count import PartialCount
from autodist.kernels import Context, rewrite
from autodist.resources import ResourceSpec
from autodist.runs.log_strategy import describe_strategy, figures_of, log_strategy
from autodist.runs.stage_costs import Rewriting, costs_of
from autodist.strategies.stage_table import PipelineFigures, StageFigures, flops_text, stage_tables
from tests.unit.kernels.in_one_process import capture
from tests.unit.kernels.pipelined.models import batches, made, pipelined, stage_of

EXAMPLES = 13
ROW = 5 * 8
KERNEL, LAYER = 25 * 8, 30 * 8
LITTLE = 32
"""Bytes: numbers of examples, shares and losses."""


@lru_cache(maxsize=2)
def captured(model):
    batch = batches(model, [EXAMPLES])[0]
    found = capture(made(model), *batch, is_global=True)
    return found, {name: given.shape for name, given in zip(found.step.inputs, batch, strict=True)}


def costs(model, stages, micro_batches, pipelines=1, is_fed=True):
    step, shapes = captured(model)
    strategy = pipelined(step.step, stage_of(step, stages), stages, micro_batches, pipelines=pipelines)
    return costs_of(step.step, Context(strategy, 0), shapes if is_fed else {}), strategy


def is_about(tally, least):
    return not tally.is_least and least <= tally.count <= least + LITTLE


def test_forward_and_backward_of_a_layer_are_told_apart():
    found, _ = costs("mlp", 4, 3)
    product = 2 * 5 * 5 * 5  # of 5 examples, the most that one of 3 micro-batches has
    assert found.examples == 5
    for stage in range(4):
        assert product <= found.forward[stage].count <= 1.4 * product
    for stage in range(1, 4):
        assert 2 * product <= found.backward[stage].count <= 2.5 * product
    assert product <= found.backward[0].count <= 1.2 * product  # the gradient of the feeds is unused


def test_transfers_between_stages_are_shown_for_each_direction():
    found, _ = costs("mlp", 2, 3)
    assert is_about(found.each[0, 1], 5 * ROW)
    assert is_about(found.each[1, 0], 5 * ROW)
    assert found.once[0, 1].count <= EXAMPLES * ROW + 4 * LITTLE  # the labels
    assert is_about(found.links[1, 0], 3 * 5 * ROW)


def test_a_skip_crosses_all_stages_and_its_gradient_all_back():
    found, _ = costs("skip", 4, 3)
    assert is_about(found.each[0, 2], 5 * ROW)  # to the third stage's sum with it
    assert is_about(found.each[2, 0], 5 * ROW)


def test_a_table_that_two_stages_use_goes_once_and_its_gradient_with_each_micro_batch():
    found, _ = costs("tied", 2, 3)
    assert found.once[0, 1].count >= 11 * ROW
    assert found.each[1, 0].count >= 11 * ROW + 5 * ROW


def test_mates_exchange_their_sums_once():
    found, strategy = costs("mlp", 2, 2, pipelines=2)
    for way in ((2, 3), (3, 2), (1, 0)):
        assert is_about(found.once[way], 2 * LAYER)
        assert way not in found.each
    assert is_about(found.once[0, 1], 2 * LAYER + 6 * ROW)  # with the other pipeline's part of the batch
    figures = figures_of(strategy, captured("mlp")[0].step, list("abcd"), [1, 1, 1, 1], found)
    cuts = {(cut.source, cut.target): cut for cut in figures.cuts}
    assert cuts[1, 1].once == found.once[2, 3]
    assert cuts[0, 0].once == found.once[0, 1]  # the most that one sends to another
    assert cuts[0, 1].each == found.each[0, 2]


def test_one_micro_batch_alone_crosses_as_one():
    found, _ = costs("mlp", 2, 1)
    assert is_about(found.each[0, 1], EXAMPLES * ROW)


def test_a_micro_batch_has_one_example_if_the_batch_is_unknown():
    found, _ = costs("mlp", 2, 3, is_fed=False)
    assert (found.examples, found.is_fed) == (1, False)
    assert is_about(found.each[0, 1], ROW)
    assert found.forward[0].count * 5 == costs("mlp", 2, 3)[0].forward[0].count


def test_a_step_that_was_rewritten_is_not_rewritten_again():
    step, shapes = captured("mlp")
    strategy = pipelined(step.step, stage_of(step, 2), 2, 3)
    seen = Rewriting()
    rewrite(step.step, Context(strategy, 0), also=seen)
    assert seen.replicated is not None
    kept = seen.replicated
    assert costs_of(step.step, Context(strategy, 0), shapes, seen) == costs("mlp", 2, 3)[0]
    assert seen.replicated is kept


def test_a_step_that_no_kernel_takes_is_told_without_its_costs():
    step, shapes = captured("mlp")
    goes_back = {name: 1 - int(name.startswith("part_3")) for name in stage_of(step, 2)}
    strategy = pipelined(step.step, goes_back, 2, 3)
    assert costs_of(step.step, Context(strategy, 0), shapes) is None
    figures = figures_of(strategy, step.step, ["a", "b"], None, None)
    text = shown(figures)
    assert "not known" in text
    assert "transfers" not in text
    assert figures.waits_by_flops is None


def shown(figures: PipelineFigures) -> str:
    console = rich.console.Console(file=io.StringIO(), width=120)
    for table in stage_tables(figures):
        console.print(table)
    return console.file.getvalue()


def test_a_worker_waits_longer_where_stages_compute_less_alike():
    found, strategy = costs("mlp", 2, 3)
    alike = figures_of(strategy, captured("mlp")[0].step, ["a", "b"], None, found)
    assert alike.waits == pytest.approx(1 / 4)
    assert alike.waits_by_flops is not None
    assert 1 / 4 < alike.waits_by_flops < 1 / 2  # the first layer has less to do


def test_partly_known_costs_are_shown_as_lower_bounds():
    assert flops_text(PartialCount(1500, is_least=True)) == "at least 1.50 k"
    assert flops_text(PartialCount(0, is_least=True)) == "not known"
    assert flops_text(PartialCount(0)) == "0"
    stage = StageFigures(("a",), 1, 8, None, PartialCount(3), PartialCount(4, is_least=True))
    assert stage.flops(2) is None
    assert StageFigures(("a",), 1, 8, None, PartialCount(3), PartialCount(4)).flops(2) == 14


def test_the_run_tells_the_stages_below_the_variables(caplog):
    spec = ResourceSpec.from_dict({"nodes": [{"address": "localhost", "cpus": [0, 1], "workers": 2}]})
    step, shapes = captured("mlp")
    strategy = pipelined(step.step, stage_of(step, 2), 2, 3)
    with caplog.at_level(logging.INFO, logger="autodist"):
        log_strategy(*describe_strategy(strategy, step.step, None, spec, None, shapes))
    told = caplog.text
    assert told.index("part_0_kernel") < told.index("FLOPs forward") < told.index("transfers")
    assert "FLOPs and bytes of a micro-batch of 5 examples" in told
    assert "0 → 1" in told


def of_two_layers(inner):
    kernels = [tf.Variable(np.eye(7) * (k + 1), name=f"part_{2 * k}_kernel") for k in range(2)]

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.tanh(inner(x) @ kernels[0]) @ kernels[1])
        for kernel, gradient in zip(kernels, tape.gradient(loss, kernels), strict=True):
            kernel.assign_sub(gradient)
        return loss

    return step


def test_the_whole_of_a_graph_of_which_nobody_knows_what_will_run_is_told_without_its_costs():
    step, shapes = captured("mlp")
    whole = replace(step.step, targets=(), outputs=())
    assert costs_of(whole, Context(pipelined(step.step, stage_of(step, 2), 2, 3), 0), shapes) is None


def costs_of_step(step, shape, rows=None):
    captured = capture_function(step, (tf.TensorSpec(shape, tf.float64),), [0])
    strategy = pipelined(captured.step, stage_of(captured, 2), 2, 2)
    shapes = {} if rows is None else dict.fromkeys(captured.step.inputs, (rows, *shape[1:]))
    return costs_of(captured.step, Context(strategy, 0), shapes)


def test_a_step_whose_constants_have_the_batch_s_length_is_told_without_its_costs():
    assert costs_of_step(of_two_layers(lambda x: x), [6, 7]) is None


def test_a_step_that_does_not_bear_one_example_is_told_without_its_costs_until_it_is_fed():
    step = of_two_layers(lambda x: tf.reshape(x, [-1, 7]))
    assert costs_of_step(step, [None]) is None
    assert costs_of_step(step, [None], 28).forward[0].count >= 2 * 2 * 7 * 7
