"""Steps on a mesh equal those of one device; the transfers of known layouts."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from autodist.kernels import Context, find_divided, rewrite
from autodist.kernels.shard import lower_reshards
from autodist.kernels.shard.reshards import ReshardKind
from tests.unit.kernels.in_one_process import Session, capture, on_mesh, one_device
from tests.unit.kernels.shard.equal_on_mesh import assert_equal_on_mesh, reshards_of
from tests.unit.kernels.shard.mesh_models import MEGATRON, Model, perceptron, table, transformer

OPTIMIZERS = {
    "the norm of each gradient": lambda: keras.optimizers.SGD(1e-2, clipnorm=0.1),
    "adafactor": lambda: keras.optimizers.Adafactor(1e-2, epsilon_1=1e-3),
}
"""Those with an update of their own; `test_megatron.py` has Adam with the norm of all gradients."""


@pytest.fixture
def in_float64(keras_in_float64):
    return keras_in_float64


@pytest.mark.parametrize("sizes", [{"model": 4}, {"data": 3, "model": 2}])
def test_columns_then_rows(sizes):
    assert_equal_on_mesh(perceptron(), sizes, {"w1": "[–, model]", "w2": "[model, –]"})


@pytest.mark.parametrize("layouts", [
    {"b1": "[model]"}, {"m1": "[model, –]"},
    {"w1": "[model, –]", "w2": "[model, –]"}, {"w1": "[–, model]", "w2": "[–, model]"},
    {"w1": "[–, model]", "m1": "[model, –]"}, {"w1": "[–, –]", "w2": "[–, –]"}, {},
], ids=str)  # fmt: skip
def test_other_layouts(layouts):
    assert_equal_on_mesh(perceptron(), {"data": 2, "model": 2}, layouts)


def test_large_sums_of_many_members(monkeypatch):
    monkeypatch.setattr(lower_reshards, "DIRECT_BYTES", 0)
    assert_equal_on_mesh(perceptron(), {"model": 4}, {"w1": "[–, model]", "w2": "[model, –]"})


def test_two_axes_of_tensors():
    layouts = {"w1": "[a, b]", "w2": "[b, a]"}
    assert_equal_on_mesh(perceptron(), {"a": 2, "b": 2}, layouts)
    assert_equal_on_mesh(perceptron(), {"a": 2, "b": 2}, {"w1": "[–, a·b]", "w2": "[b·a, –]"})


def test_columns_then_rows_are_summed_once():
    found = reshards_of(perceptron(), {"model": 2}, {"w1": "[–, model]", "w2": "[model, –]"})
    assert found == {ReshardKind.ALL_REDUCE: 1}


@pytest.mark.parametrize("update", ["rows", "dense"])
@pytest.mark.parametrize("row", [8, -1])
def test_an_index_outside_of_a_divided_table_is_an_error(update, row):
    model = table(update)
    ids, y = model.batches[0]
    wrong = np.where(np.arange(ids.size).reshape(ids.shape) == 4, row, ids)
    with pytest.raises(tf.errors.InvalidArgumentError, match=f"{row} is not in"):
        one_device(model.captured, model.step, [(wrong, y)])
    session = Session(model.captured, on_mesh(model.captured.step, {"model": 2}, {"rows": "[model, –]"}))
    with pytest.raises(tf.errors.InvalidArgumentError, match=f"{row} is not in"):
        session.train([(wrong, y)])


def test_loops_that_read_one_value_share_its_copy():
    rng = np.random.default_rng(0)
    w = tf.Variable(0.3 * rng.normal(size=(4, 4)), name="w")

    def turns(x):
        return tf.while_loop(lambda k, _: k < 3, lambda k, h: (k + 1, tf.tanh(h @ w)), (0, x))[1]

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.reduce_sum(turns(x) * turns(x + 1.0), 1))
        w.assign_sub(0.1 * tape.gradient(loss, w))
        return loss, tf.reduce_sum(turns(tf.ones_like(w)))

    batches = [(rng.normal(size=(n, 4)),) for n in (4, 3)]
    model = Model(step, capture(step, *batches[0]), batches)
    found = reshards_of(model, {"model": 2}, {"w": "[–, model]"})
    assert found[ReshardKind.ALL_GATHER] == 2  # before and after the update
    assert_equal_on_mesh(model, {"model": 2}, {"w": "[–, model]"})


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_transformer(name):
    model = transformer(OPTIMIZERS[name]())
    layouts = model.layouts({**MEGATRON, "head/kernel": "[–, model]"})
    assert_equal_on_mesh(model, {"model": 2}, layouts, 1e-9)


@pytest.mark.usefixtures("in_float64")
def test_a_block_is_summed_twice_forward_and_twice_backward_and_the_norm_of_all_gradients_once():
    model = transformer(keras.optimizers.SGD(1e-2, global_clipnorm=0.1), blocks=2)
    found = reshards_of(model, {"model": 2}, model.layouts(MEGATRON))
    assert found == {ReshardKind.ALL_REDUCE: 8 + 1, ReshardKind.INDEX: 1}


@pytest.mark.usefixtures("in_float64")
def test_each_place_holds_its_part_of_variables_and_slots():
    model = transformer(keras.optimizers.Adam(1e-2))
    strategy = on_mesh(model.captured.step, {"model": 2}, model.layouts(MEGATRON))
    step = rewrite(model.captured.step, Context(strategy, 0))
    shapes = {variable.name: variable.shape for variable in step.variables}
    divided = {name for name, sharding in step.shardings.items() if sharding.divides}
    kernels = [name for name in divided if name.endswith("kernel")]
    assert len(kernels) == 6
    assert len(divided) == 3 * (6 + 4)  # with the biases of query, key, value and up; a variable has two slots
    whole = {variable.name: variable for variable in model.captured.step.variables}
    for name in divided:
        assert np.prod(shapes[name]) * 2 == np.prod(whole[name].shape)


@pytest.mark.parametrize("update", ["rows", "dense", "tied"])
@pytest.mark.parametrize("layout", ["[model, –]", "[–, model]"])
def test_a_table(update, layout):
    assert_equal_on_mesh(table(update), {"data": 2, "model": 2}, {"rows": layout})


def test_rows_of_a_divided_table_are_summed_once():
    assert reshards_of(table("rows"), {"model": 2}, {"rows": "[model, –]"})[ReshardKind.ALL_GATHER] == 0


def test_the_holders_of_divided_variables_are_known_before_a_step_runs():
    model = perceptron()
    strategy = on_mesh(model.captured.step, {"data": 2, "model": 2}, {"w1": "[–, model]"})
    context = Context(strategy, 0)
    shardings, holders = find_divided(model.captured.step, context)
    assert shardings.keys() == holders.keys() >= {"w1", "m1"}
    made = rewrite(model.captured.step, context).holders
    assert holders == {name: made[name] for name in holders}
    assert [one.group.workers for one in holders["m1"].slices] == [(0, 2), (1, 3)]
