"""Several places of one worker share a graph: steps equal those of one device, and parts are exchanged in the graph."""

from __future__ import annotations

from collections import Counter

import keras
import numpy as np
import pytest

from autodist.graph.inboxes import inboxes_of
from autodist.kernels import Context, rewrite
from autodist.kernels.shard import lower_reshards
from autodist.kernels.shard.reshards import Reshard, ReshardKind
from tests.unit.kernels.in_one_process import on_mesh
from tests.unit.kernels.pairs import pairs
from tests.unit.kernels.shard.equal_on_mesh import assert_equal_on_mesh
from tests.unit.kernels.shard.mesh_models import MEGATRON, perceptron, table, transformer

MLP = {"w1": "[–, model]", "w2": "[model, –]"}
ONE, TWO = 4, 2
"""Devices of each worker: of one worker with four, and of two workers with two."""


@pytest.mark.parametrize(
    ("sizes", "devices"),
    [
        ({"data": 2, "model": 2}, ONE),
        ({"data": 2, "model": 2}, TWO),  # the axis of the model within a worker
        ({"data": 1, "model": 4}, TWO),  # across workers
        ({"data": 2, "model": 4}, TWO),
        ({"model": 2, "data": 3}, 3),  # in the other order, the places of a worker would be no block
    ],
    ids=str,
)
def test_columns_then_rows(sizes, devices):
    assert_equal_on_mesh(perceptron(), sizes, MLP, devices=devices)


@pytest.mark.parametrize(("layouts", "devices"), pairs([
    {"w1": "[model, –]", "w2": "[–, model]"}, {"b1": "[model]"}, {"w1": "[–, model]", "m1": "[model, –]"}, {},
], [ONE, TWO]))  # fmt: skip
def test_other_layouts(layouts, devices):
    assert_equal_on_mesh(perceptron(), {"a": 2, "model": 2}, layouts, devices=devices)


@pytest.mark.parametrize(("layouts", "devices"), pairs([
    {"w1": "[a, b]", "w2": "[b, a]"}, {"w1": "[–, a·b]", "w2": "[b·a, –]"}, {"w1": "[–, a]", "w2": "[b, –]"},
], [ONE, TWO]))  # fmt: skip
def test_two_axes_of_tensors(layouts, devices):
    assert_equal_on_mesh(perceptron(), {"a": 2, "b": 2}, layouts, devices=devices)


def test_large_sums_of_several_workers(monkeypatch):
    monkeypatch.setattr(lower_reshards, "DIRECT_BYTES", 0)
    assert_equal_on_mesh(perceptron(), {"model": 8}, MLP, devices=2)


@pytest.mark.parametrize(("update", "one", "two"), [
    ("rows", "[model, –]", "[–, model]"), ("dense", "[–, model]", "[model, –]"), ("tied", "[–, model]", "[model, –]"),
])  # fmt: skip
def test_a_table(update, one, two):
    model = table(update)
    assert_equal_on_mesh(model, {"data": 2, "model": 2}, {"rows": one}, devices=ONE)
    assert_equal_on_mesh(model, {"model": 4}, {"rows": two}, devices=TWO)


@pytest.mark.usefixtures("keras_in_float64")
@pytest.mark.parametrize(("sizes", "devices"), [({"data": 2, "model": 2}, ONE), ({"model": 4}, TWO)], ids=str)
def test_a_transformer(sizes, devices):
    model = transformer(keras.optimizers.SGD(1e-2, global_clipnorm=0.1))
    layouts = model.layouts({**MEGATRON, "head/kernel": "[–, model]"})
    assert_equal_on_mesh(model, sizes, layouts, 1e-9, devices=devices)


def rewritten(model, sizes, layouts, devices, worker=0):
    """Returns the step of a worker, and the kinds of reshard nodes behind the kernel."""
    found: Counter[ReshardKind] = Counter()

    def count(kernel, step):
        if kernel == "copy-for-places":
            found.update(one.kind for node in step.graph_def.node if (one := Reshard.of(node)))

    context = Context(on_mesh(model.captured.step, sizes, layouts, devices=devices), worker)
    return rewrite(model.captured.step, context, also=count), found


def test_places_of_one_worker_exchange_no_messages():
    step, found = rewritten(perceptron(), {"data": 2, "model": 2}, MLP, ONE)
    assert not found
    assert not inboxes_of(step.graph_def)


def test_a_worker_sends_one_sum_for_its_places():
    step, found = rewritten(perceptron(), {"model": 4}, MLP, TWO)
    assert found == {ReshardKind.ALL_REDUCE: 1}
    sums = [one for name, one in inboxes_of(step.graph_def).items() if "written" not in name]
    assert [one.source for one in sums] == [1]


def test_nodes_on_whole_tensors_run_once():
    model = perceptron()
    step, _ = rewritten(model, {"model": 2}, MLP, 2)
    ops, captured = (Counter(node.op for node in s.graph_def.node) for s in (step, model.captured.step))
    assert ops["Relu"] == ops["ReluGrad"] == 2
    assert ops["Pow"] == captured["Pow"] > 0


def test_each_part_of_a_variable_is_on_the_device_of_its_place():
    model = perceptron()
    strategy = on_mesh(model.captured.step, {"data": 2, "model": 2}, MLP, devices=4)
    for replicas in (strategy.mesh.places, strategy.graph_config.replicas):
        for k, place in enumerate(replicas):
            place.device = f"gpu:{k}"
    step = rewrite(model.captured.step, Context(strategy, 0))
    nodes = {node.name: node for node in step.graph_def.node}
    parts = {v.name: nodes[v.handle] for v in step.variables}
    at = {name: (node.attr["shared_name"].s[-8:].decode(), node.device[-5:]) for name, node in parts.items()}
    assert at["w1"] == ("/shard_0", "GPU:0")
    assert at["w1/part_1"] == ("/shard_1", "GPU:1")
    assert [one.device(0) for one in step.holders["w1"].slices] == ["gpu:0", "gpu:1"]
    assert {node.device[-5:] for node in nodes.values() if node.op == "Relu"} == {"GPU:0", "GPU:1", "GPU:2", "GPU:3"}
    shapes = {v.name: v.shape for v in step.variables}
    assert shapes["w1"] == shapes["w1/part_1"] == (6, 4)
    assert np.prod(shapes["m1"]) == 24
