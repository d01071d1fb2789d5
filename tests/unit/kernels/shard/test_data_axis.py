"""Variables that the data axis of a mesh divides: a step equals that of one device; each worker holds its slices."""

from __future__ import annotations

from dataclasses import replace

import keras
import pytest

from autodist.kernels import Context, find_divided, rewrite
from autodist.kernels.place.gather_layers import GATHER
from tests.unit.kernels.in_one_process import Session, assert_same, on_mesh, one_device
from tests.unit.kernels.shard.mesh_models import Model, perceptron, table, transformer


def assert_equal_on_mesh(model: Model, sizes: dict[str, int], layouts: dict[str, str], rtol: float = 1e-12) -> None:
    strategy = on_mesh(model.captured.step, sizes, layouts)
    expected = one_device(model.captured, model.step, model.batches)
    assert_same(Session(model.captured, strategy).train(model.batches), expected, rtol)


@pytest.mark.parametrize(
    "sizes", [{"data": 2, "model": 1}, {"data": 4, "model": 1}, {"data": 2, "model": 2}, {"data": 3, "model": 2}]
)
@pytest.mark.parametrize(
    "layouts",
    [
        {"w1": "[data, –]"},
        {"w1": "[–, data]", "b1": "[data]"},
        {"w1": "[data, model]", "w2": "[model, data]"},
        {"w1": "[model, data]", "w2": "[data, model]", "b1": "[data]"},
        {"w1": "[–, model·data]", "w2": "[data·model, –]"},
    ],
    ids=str,
)
def test_a_perceptron(sizes, layouts):
    assert_equal_on_mesh(perceptron(), sizes, layouts)


BY_DATA_AND_MODEL = {
    "embed/embeddings": "[model, data]",
    r"b\d_att/(query|key|value)/kernel": "[data, model, –]",
    r"b\d_att/attention_output/kernel": "[model, –, data]",
    r"b\d_up/kernel": "[data, model]",
    r"b\d_down/kernel": "[model, data]",
    r".*(gamma|beta)": "[data]",
}
OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "sgd with momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(1e-2, epsilon=1e-3),
    "the norm of each gradient": lambda: keras.optimizers.SGD(1e-2, clipnorm=0.1),
    "the norm of all gradients": lambda: keras.optimizers.SGD(1e-2, global_clipnorm=0.1),
    "adafactor": lambda: keras.optimizers.Adafactor(1e-2, epsilon_1=1e-3),
}


@pytest.mark.usefixtures("keras_in_float64")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_transformer(name):
    model = transformer(OPTIMIZERS[name](), lengths=(4, 3, 1))
    assert_equal_on_mesh(model, {"data": 2, "model": 2}, model.layouts(BY_DATA_AND_MODEL), 1e-9)


@pytest.mark.parametrize("update", ["rows", "dense", "tied"])
@pytest.mark.parametrize("layout", ["[data, –]", "[–, data]", "[model, data]", "[data, model]"])
def test_a_table(update, layout):
    assert_equal_on_mesh(table(update), {"data": 2, "model": 2}, {"rows": layout})


def test_slices_have_one_owner_in_each_row_and_slots_too():
    model = perceptron()
    strategy = on_mesh(model.captured.step, {"data": 2, "model": 2}, {"w1": "[data, model]", "w2": "[–, data]"})
    for worker in range(4):
        shardings, holders = find_divided(model.captured.step, Context(strategy, worker))
        assert holders == rewrite(model.captured.step, Context(strategy, worker)).holders
        assert "data" not in {axis for one in shardings.values() for axis in one.used()}
        assert [(one.begin, one.shape, one.group.workers) for one in holders["m1"].slices] == [
            ((0, 0), (3, 4), (0,)),
            ((0, 4), (3, 4), (1,)),
            ((3, 0), (3, 4), (2,)),
            ((3, 4), (3, 4), (3,)),
        ]
        assert holders["w1"].slices == holders["m1"].slices and holders["w1"].axis is None
        assert [one.group.workers for one in holders["w2"].slices] == [(0, 1), (2, 3)]
        assert holders["w2"].axis == 1 and holders["w2"].layer


def test_later_steps_have_the_slices_of_earlier_ones():
    model = perceptron()
    context = Context(on_mesh(model.captured.step, {"data": 2, "model": 2}, {"w1": "[data, model]"}), 3)
    first = rewrite(model.captured.step, context)
    later = replace(model.captured.step, holders=first.holders)
    for node in context.strategy.nodes:
        node.ClearField("partition"), node.ClearField("shards")
        node.all_reduce.SetInParent()
    assert rewrite(later, context).holders == first.holders


@pytest.mark.usefixtures("keras_in_float64")
def test_the_parameters_of_each_layer_are_gathered_twice_but_the_last():
    model = transformer(OPTIMIZERS["sgd"](), blocks=3)
    layouts = model.layouts({r"b\d_(up|down)/kernel": "[data, –]"})
    step = rewrite(model.captured.step, Context(on_mesh(model.captured.step, {"data": 2}, layouts), 0))
    gathers = {node.attr[GATHER].i for node in step.graph_def.node if GATHER in node.attr}
    assert gathers and len(gathers) % 2, "each layer forward and backward, the last one once"
