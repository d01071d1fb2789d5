"""Variables that the data axis of a mesh divides: a step equals that of one device; each worker holds its slices."""

from __future__ import annotations

from dataclasses import replace

import keras
import pytest

from autodist.kernels import Context, find_divided, rewrite
from autodist.kernels.place.gather_layers import GATHER
from autodist.kernels.plan import CACHED_COPY
from autodist.kernels.shard.holders import HoldInRows
from autodist.options.fields import OptionError
from autodist.placement.holder import Copy
from autodist.sharding import Axis, Mesh
from autodist.strategies.mesh_data import owners_in_rows
from tests.unit.kernels.in_one_process import Session, on_mesh
from tests.unit.kernels.shard.drawn_models import assert_as_expected, expected_of, model_of
from tests.unit.kernels.shard.equal_on_mesh import assert_equal_on_mesh
from tests.unit.kernels.shard.mesh_models import perceptron, table, transformer

LAYOUTS = [
    {"w1": "[data, –]"},
    {"w1": "[–, data]", "b1": "[data]"},
    {"w1": "[data, model]", "w2": "[model, data]"},
    {"w1": "[model, data]", "w2": "[data, model]", "b1": "[data]"},
    {"w1": "[–, model·data]", "w2": "[data·model, –]"},
]


@pytest.mark.parametrize(
    ("sizes", "layouts"),
    [
        ({"data": 4, "model": 1}, LAYOUTS[0]),
        ({"data": 2, "model": 1}, LAYOUTS[1]),
        ({"data": 2, "model": 2}, LAYOUTS[2]),
        ({"data": 2, "model": 2}, LAYOUTS[3]),
        ({"data": 3, "model": 2}, LAYOUTS[4]),
    ],
    ids=str,
)
def test_a_perceptron(sizes, layouts):
    assert_equal_on_mesh(perceptron(), sizes, layouts)


@pytest.mark.parametrize(
    ("sizes", "devices", "layouts"),
    [
        ({"data": 2, "model": 2}, 4, LAYOUTS[4]),
        *(({"data": 2, "model": 2}, 2, layouts) for layouts in LAYOUTS[:4:2]),  # the axis of the model within a worker
        *(({"model": 2, "data": 2}, 2, layouts) for layouts in LAYOUTS[1::2]),  # the axis of the data within a worker
        ({"data": 4, "model": 2}, 4, LAYOUTS[3]),
    ],
    ids=str,
)
def test_workers_with_several_devices(sizes, devices, layouts):
    assert_equal_on_mesh(perceptron(), sizes, layouts, devices=devices)


BY_DATA_AND_MODEL = {
    "embed/embeddings": "[model, data]",
    r"b\d_att/(query|key|value)/kernel": "[data, model, –]",
    r"b\d_att/attention_output/kernel": "[model, –, data]",
    r"b\d_up/kernel": "[data, model]",
    r"b\d_down/kernel": "[model, data]",
    r".*(gamma|beta)": "[data]",
}


@pytest.mark.usefixtures("keras_in_float64")
def test_a_transformer():
    model = transformer(keras.optimizers.SGD(1e-2, global_clipnorm=0.1), lengths=(4, 3, 1))
    assert_equal_on_mesh(model, {"data": 2, "model": 2}, model.layouts(BY_DATA_AND_MODEL), 1e-9)


@pytest.mark.parametrize(
    ("update", "layout"),
    [
        ("rows", "[data, –]"), ("rows", "[data, model]"), ("dense", "[–, data]"),
        ("tied", "[data, –]"), ("tied", "[model, data]"),
    ],
)  # fmt: skip
def test_a_table(update, layout):
    assert_equal_on_mesh(table(update), {"data": 2, "model": 2}, {"rows": layout})


@pytest.mark.parametrize(
    ("sizes", "layouts", "devices"),
    [
        ({"data": 2, "model": 1}, {}, 1),
        ({"data": 3, "model": 2}, {"w2": "[model, –]"}, 1),
        ({"data": 2, "model": 2}, {"w2": "[data, model]"}, 2),
    ],
    ids=str,
)
def test_slots_alone(sizes, layouts, devices):
    whole = {"w1": "[–, –]", "b1": "[–]"}
    assert_equal_on_mesh(perceptron(), sizes, layouts | whole, devices=devices, slots=whole)


@pytest.mark.usefixtures("keras_in_float64")
def test_the_slots_of_a_transformer():
    model = transformer(keras.optimizers.SGD(1e-2, momentum=0.9), lengths=(4, 3, 1))
    layouts = {k: v for k, v in BY_DATA_AND_MODEL.items() if "att" in k} | {"embed/embeddings": "[–, –]"}
    whole = {r"b\d_(up|down)/kernel": "[–, –]", r".*(gamma|beta)": "[–]", "embed/embeddings": "[–, –]"}
    slots = model.layouts(whole)
    assert_equal_on_mesh(model, {"data": 2, "model": 2}, model.layouts(layouts) | slots, 1e-9, slots=slots)


@pytest.mark.usefixtures("keras_in_float64")
def test_slots_of_another_shape_than_their_variable():
    model = model_of("adafactor")
    whole = {one.name: f"[{', '.join('–' * len(one.shape))}]" for one in model.captured.step.variables if one.trainable}
    strategy = on_mesh(model.captured.step, {"data": 2, "model": 2}, whole, slots=whole)
    assert_as_expected(Session(model.captured, strategy).train(model.batches), expected_of("adafactor", 2))


@pytest.mark.parametrize("update", ["rows", "tied"])
def test_the_slots_of_a_table(update):
    assert_equal_on_mesh(table(update), {"data": 2, "model": 2}, {"rows": "[–, –]"}, slots=["rows"])


def test_slots_are_in_slices_and_each_place_reads_its_own_copy_of_the_value():
    model = perceptron()
    strategy = on_mesh(model.captured.step, {"data": 2, "model": 2}, {"w1": "[–, –]"}, slots=["w1"])
    step = rewrite(model.captured.step, Context(strategy, 1))
    for name in ("w1", "m1"):
        assert [(one.begin, one.shape, one.group.workers) for one in step.holders[name].slices] == [
            ((0, 0), (3, 8), (0, 1)),
            ((3, 0), (3, 8), (2, 3)),
        ]
    assert {one.copies for one in step.holders["w1"].slices} == {(Copy(CACHED_COPY, is_at_owner=False),)}
    assert {one.copies for one in step.holders["m1"].slices} == {()}
    later = replace(model.captured.step, holders=step.holders)
    assert HoldInRows().apply(later, Context(strategy, 1)).holders["w1"].slices[0].copies == (
        Copy(CACHED_COPY, is_at_owner=False),
    )
    assert not any(GATHER in node.attr for node in step.graph_def.node)
    assert any(node.name.startswith("autodist/cached_copy/") for node in step.graph_def.node)


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


def test_workers_with_several_coordinates_own_a_slice_of_each_part():
    model = perceptron()
    layouts = {"w1": "[data, model]", "w2": "[–, data]"}
    strategy = on_mesh(model.captured.step, {"data": 2, "model": 2}, layouts, devices=2)
    for k, place in enumerate(strategy.mesh.places):
        place.device = f"gpu:{k % 2}"
    step = rewrite(model.captured.step, Context(strategy, 1))
    assert [(one.begin, one.group.places) for one in step.holders["m1"].slices] == [
        ((0, 0), ((0, "gpu:0"),)),
        ((0, 4), ((0, "gpu:1"),)),
        ((3, 0), ((1, "gpu:0"),)),
        ((3, 4), ((1, "gpu:1"),)),
    ]
    assert [one.group.workers for one in step.holders["w2"].slices] == [(0,), (1,)]
    assert {*step.holders} == {"w1", "w2", "b1", "m1"}
    nodes = {v.name: step.graph_index.nodes[v.handle] for v in step.variables if v.name.startswith("w1")}
    stored = {name: (node.attr["shared_name"].s[-16:].decode(), node.device[-12:]) for name, node in nodes.items()}
    assert stored["w1/shard_1"] == ("/shard_1/shard_0", "device:GPU:0")
    assert stored["w1/part_1/shard_1"] == ("/shard_1/shard_1", "device:GPU:1")


def test_slices_of_workers_with_unequal_rows_are_refused():
    mesh = Mesh((Axis("data", 4), Axis("model", 2)))
    with pytest.raises(OptionError, match="different numbers of devices along it"):
        owners_in_rows(mesh, [0, 2, 0, 2, 0, 3, 1, 3], "data")


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
    model = transformer(keras.optimizers.SGD(0.1), blocks=2)
    layouts = model.layouts({r"b\d_(up|down)/kernel": "[data, –]"})
    step = rewrite(model.captured.step, Context(on_mesh(model.captured.step, {"data": 2}, layouts), 0))
    gathers = {node.attr[GATHER].i for node in step.graph_def.node if GATHER in node.attr}
    assert gathers and len(gathers) % 2, "each layer forward and backward, the last one once"
