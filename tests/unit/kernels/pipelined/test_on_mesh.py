"""Pipelines that are the rows of a mesh: the workers of a stage divide its tensors."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from autodist.errors import StrategyError
from autodist.kernels import Context, rewrite
from tests.transfers.graphs import faults_of
from tests.transfers.steps import transfers_of
from tests.unit.kernels.in_one_process import Session, assert_same, capture, one_device, plan, rewritten, train
from tests.unit.kernels.in_one_session import partners_of, readers_of
from tests.unit.kernels.pipelined import models
from tests.unit.kernels.pipelined.models import on_mesh
from tests.unit.kernels.shard.mesh_models import MEGATRON, table, transformer

LAYOUTS = {
    "part_0_kernel": "[–, model]", "part_1_kernel": "[model, –]",
    "part_2_kernel": "[–, model]", "part_3_kernel": "[model, –]",
}  # fmt: skip
"""A pair of columns and rows in each of two stages."""

SMALL = {"stage": 2, "data": 1, "model": 2}


@pytest.fixture
def in_float64(keras_in_float64):
    return keras_in_float64


def captured_layers(optimizer="sgd", counts=(8, 7, 1)):
    step, given = models.made("divisible", optimizer), models.batches("divisible", counts)
    return step, given, capture(step, *given[0], is_global=True)


@pytest.mark.parametrize(
    ("sizes", "optimizer", "schedule"),
    [(SMALL, "norm", "1F1B"), ({"stage": 2, "data": 2, "model": 2}, "sgd", "GPipe")],
)
def test_stages_that_are_divided_train_as_one_device_and_as_all_micro_batches(sizes, optimizer, schedule):
    step, given, captured = captured_layers(optimizer)
    strategy = on_mesh(captured.step, models.stage_of(captured, 2), sizes, LAYOUTS, schedule=schedule)
    found = train(captured, strategy, given)
    assert_same(found, one_device(captured, step, given), rtol=1e-9)
    assert_same(found, train(captured, plan(captured.step, 1, 2 * sizes["data"]), given))


def test_layouts_of_one_stage_and_a_division_inside_of_a_pair():
    step, given, captured = captured_layers(counts=(5, 2))
    layouts = {"part_1_kernel": "[–, model]", "part_2_kernel": "[model, –]"}  # the stages are divided between them
    strategy = on_mesh(captured.step, models.stage_of(captured, 2), SMALL, layouts)
    assert_same(train(captured, strategy, given), one_device(captured, step, given), rtol=1e-9)


@pytest.mark.slow
@pytest.mark.usefixtures("in_float64")
def test_a_transformer_whose_micro_batches_call_functions_and_recompute():
    model = transformer(keras.optimizers.SGD(0.1, global_clipnorm=0.3), lengths=(9, 3))
    step = model.captured.step
    layouts = model.layouts({**MEGATRON, "embed/embeddings": "[model, –]", "head/kernel": "[–, model]"})
    stage_of = {
        g.variable: int(g.variable.startswith(("b0_ln2", "b0_up", "b0_down", "head"))) for g in step.gradients
    }  # fmt: skip
    session = Session(model.captured, on_mesh(step, stage_of, SMALL, layouts, micro_batches=4, recompute=True))
    assert faults_of(transfers_of([session.steps])) == []
    assert any("PartitionedCall" in node.op for node in session.steps[0].graph_def.node)
    assert_same(session.train(model.batches), one_device(model.captured, model.step, model.batches), rtol=1e-9)


def test_a_table_that_both_stages_use():
    model = table("tied")
    strategy = on_mesh(model.captured.step, {"rows": 0, "w": 1}, SMALL, {"rows": "[model, –]"})
    found = train(model.captured, strategy, model.batches)
    assert_same(found, one_device(model.captured, model.step, model.batches), rtol=1e-9)


def in_a_loop(w, x):
    return tf.map_fn(lambda row: tf.tanh(tf.linalg.matvec(w, row, transpose_a=True)), x)


def by_elements(w, x):
    return x + tf.gather_nd(w, tf.cast(tf.abs(x[:, :2]), tf.int32) % 6)[:, None]


def in_a_branch(w, x):
    """The branch writes the variable, too."""
    return x @ tf.cond(tf.reduce_sum(w) > -99.0, lambda: w.assign_add(tf.ones_like(w)), lambda: w.assign(-w))


@pytest.mark.parametrize("use", [in_a_loop, by_elements, in_a_branch])
def test_the_whole_of_a_divided_variable_is_there_before_its_use(use):
    """A loop's gradient asks for the shape of the copy that the loop reads, as soon as its handle is there."""
    rng = np.random.default_rng(0)
    first, last = (tf.Variable(rng.normal(size=(6, 6)) * 0.3, name=f"part_{k}_kernel") for k in (0, 2))

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.tanh(use(first, x)) @ last))
        for variable, gradient in zip([first, last], tape.gradient(loss, [first, last]), strict=True):
            variable.assign_sub(0.1 * tf.convert_to_tensor(gradient))
        return loss

    given = [(rng.normal(size=(n, 6)),) for n in (5, 2)]
    captured = capture(step, *given[0], is_global=True)
    layouts = {"part_0_kernel": "[–, model]", "part_2_kernel": "[model, –]"}
    strategy = on_mesh(captured.step, models.stage_of(captured, 2), SMALL, layouts)
    assert_same(train(captured, strategy, given), one_device(captured, step, given), rtol=1e-9)


def test_a_worker_holds_a_part_of_the_variables_of_its_stage():
    _, _, captured = captured_layers()
    strategy = on_mesh(captured.step, models.stage_of(captured, 2), {"stage": 2, "data": 2, "model": 2}, LAYOUTS)
    step = rewrite(captured.step, Context(strategy, 5))
    slices = {name: [one.group.workers for one in holder.slices] for name, holder in step.holders.items()}
    assert slices["part_0_kernel"] == [(0, 2), (1, 3)]
    assert slices["part_0_bias"] == [(0, 2), (1, 3)]
    assert slices["part_1_bias"] == [(0, 1, 2, 3)]  # behind the sum, it is whole
    assert slices["part_3_kernel"] == [(4, 6), (5, 7)]
    assert Context(strategy, 5).placement.stages.groups[1].workers == (5, 7)
    assert Context(strategy, 5).group.everyone == (1, 3, 5, 7)


def test_workers_of_a_row_exchange_the_parts_of_their_own_stage_alone():
    _, _, captured = captured_layers()
    strategy = on_mesh(captured.step, models.stage_of(captured, 2), SMALL, LAYOUTS)
    items = rewritten(captured, strategy)
    assert faults_of(transfers_of([items])) == []
    products = [len(list(step.graph_index.of_op("MatMul"))) for step in items]
    assert products == [2 * 5, 2 * 5, 2 * 6, 2 * 6]  # the first layer has no gradient of its input
    assert [partners_of(step) for step in items] == [{1, 2, 3}, {0, 2, 3}, {0, 1, 3}, {0, 1, 2}]  # signals, too
    for worker, item in enumerate(items):
        sums = {reader for name, reader in readers_of(item).items() if "lowered" in name}
        assert sums == {worker ^ 1}


@pytest.mark.parametrize("dimensions", ["[stage, –]", "[–, stage]"])
def test_a_tensor_divided_along_the_stages_is_refused(dimensions):
    _, _, captured = captured_layers()
    strategy = on_mesh(captured.step, models.stage_of(captured, 2), SMALL, {"part_0_kernel": dimensions})
    with pytest.raises(StrategyError, match="a test names the axis 'stage' of the pipeline stages"):
        rewrite(captured.step, Context(strategy, 0))
