"""Costs of steps on a mesh: the bytes of a run's messages, the parts of variables, and their FLOPs."""

from __future__ import annotations

import logging
from collections import Counter

import keras
import pytest

from autodist.batch.examples import share_of
from autodist.graph.partial_count import PartialCount
from autodist.kernels import Context, rewrite
from autodist.resources import ResourceSpec
from autodist.runs.log_strategy import describe_strategy, log_strategy
from autodist.runs.mesh_costs import mesh_costs
from autodist.runs.stage_costs import Rewriting
from tests.unit.kernels.in_one_process import Session, capture, on_mesh
from tests.unit.kernels.pipelined import models
from tests.unit.kernels.shard.mesh_models import MEGATRON, Model, perceptron, table, transformer
from tests.unit.kernels.traffic import bytes_sent

LITTLE = 192
"""Bytes over the data axis: losses, numbers of examples, and the zeros that align the vectors of a message."""


@pytest.fixture
def in_float64(keras_in_float64):
    return keras_in_float64


def shapes_of(model, strategy):
    """The shapes of the inputs in the chief's part of the first batch."""
    workers = [replica.worker for replica in Context(strategy, 0).replicas]
    lengths = [share_of(len(given), workers, 0).size for given in model.batches[0]]
    named = zip(model.captured.step.inputs, lengths, model.batches[0], strict=True)
    return {name: (length, *given.shape[1:]) for name, length, given in named}


def costs_of(model, strategy, is_fed=True):
    return mesh_costs(model.captured.step, Context(strategy, 0), shapes_of(model, strategy) if is_fed else {})


def sent_in_a_run(model, strategy):
    found = Counter()
    for one, count in bytes_sent(Session(model.captured, strategy), model.batches[0]).items():
        found[one.source, one.to] += count
    return found


SIGNALS = 2
"""Bytes that tell the others of a row that a place has begun a step, and that it has written its parts."""


def assert_as_in_a_run(model, sizes, layouts, little=SIGNALS, devices=1, spared=0):
    """Compares the bytes from worker to worker; a run spares those of layers that are not gathered again."""
    strategy = on_mesh(model.captured.step, sizes, layouts, devices=devices)
    costs, real = costs_of(model, strategy), sent_in_a_run(model, strategy)
    assert not any(sent.is_least for sent in costs.links.values())
    for link in costs.links.keys() | real.keys():
        count = costs.links.get(link, PartialCount()).count - spared
        assert count <= real[link] <= count + little, (link, count, real[link])


@pytest.mark.parametrize("layouts", [
    {"w1": "[–, model]", "w2": "[model, –]"}, {"w1": "[model, –]"}, {"w2": "[–, model]"}, {"b1": "[model]"},
    {"w1": "[model, –]", "w2": "[model, –]"}, {"w1": "[–, model]", "w2": "[–, model]"}, {},
], ids=str)  # fmt: skip
def test_links_carry_the_bytes_of_a_run(layouts):
    assert_as_in_a_run(perceptron(), {"model": 2}, layouts)


def test_links_of_two_axes_carry_the_bytes_of_a_run():
    assert_as_in_a_run(perceptron(), {"a": 2, "b": 2}, {"w1": "[a, b]", "w2": "[b, a]"})
    assert_as_in_a_run(perceptron(), {"a": 2, "b": 2}, {"w1": "[–, a·b]", "w2": "[b·a, –]"})


def test_gradients_of_parts_are_summed_over_the_data_axis():
    assert_as_in_a_run(perceptron(), {"data": 2, "model": 2}, {"w1": "[–, model]", "w2": "[model, –]"}, LITTLE)


@pytest.mark.parametrize(("sizes", "layouts"), [
    ({"model": 4}, {"w1": "[–, model]", "w2": "[model, –]"}),
    ({"model": 4}, {"w2": "[–, model]"}),
    ({"data": 2, "model": 2}, {"w1": "[–, model]", "w2": "[model, –]"}),
    ({"data": 2, "model": 2}, {"w1": "[–, model]", "m1": "[–, –]"}),
    ({"data": 2, "model": 2}, {}),
], ids=str)  # fmt: skip
def test_links_of_workers_with_two_places_carry_the_bytes_of_a_run(sizes, layouts):
    assert_as_in_a_run(perceptron(), sizes, layouts, 2 * LITTLE if "data" in sizes else SIGNALS, devices=2)


@pytest.mark.parametrize("sizes", [{"data": 2, "model": 2}, {"model": 2, "data": 2}], ids=str)
def test_slices_of_workers_with_two_places_carry_the_bytes_of_a_run(sizes):
    layouts = {"w1": "[data, model]", "w2": "[model, data]"}
    slices = (6 * 8 + 8 * 4) * 8 // 2  # of the first and of the last layer
    assert_as_in_a_run(perceptron(), sizes, layouts, 2 * LITTLE, devices=2, spared=slices)


def test_places_of_one_worker_send_nothing():
    model = perceptron()
    strategy = on_mesh(
        model.captured.step, {"data": 2, "model": 2}, {"w1": "[–, model]", "w2": "[model, –]"}, devices=4
    )
    costs = costs_of(model, strategy)
    assert not costs.links
    [sums] = costs.figures().collectives
    assert (sums.kind, sums.calls, sums.sent) == ("all_reduce", 1, PartialCount(0))
    step = Session(model.captured, strategy).steps[0]
    assert costs.held(0) == costs.figures().held == sum(variable.byte_size for variable in step.variables)


@pytest.mark.parametrize("sizes", [{"model": 2}, {"data": 2, "model": 2}], ids=str)
def test_rows_of_a_divided_table(sizes):
    assert_as_in_a_run(table("rows"), sizes, {"rows": "[model, –]"}, LITTLE if "data" in sizes else SIGNALS)


def test_the_workers_of_a_stage_send_the_bytes_of_a_run():
    step, given = models.made("divisible", "sgd"), models.batches("divisible", (8,))
    captured = capture(step, *given[0], is_global=True)
    model = Model(step, captured, given)
    layouts = {f"part_{k}_kernel": "[model, –]" if k % 2 else "[–, model]" for k in range(4)}
    strategy = models.on_mesh(captured.step, models.stage_of(captured, 2), {"stage": 2, "data": 1, "model": 2}, layouts)
    costs, real = costs_of(model, strategy), sent_in_a_run(model, strategy)
    activations = 8 * models.WIDTH * 8  # of all micro-batches
    # The first stage also sums the gradient of its result.
    sums = [("all_reduce of stage 0", 4, 2 * activations), ("all_reduce of stage 1", 2, activations)]
    assert [(one.kind, one.calls, one.sent.count) for one in costs.figures().collectives] == sums
    for source, to in ((0, 1), (1, 0), (2, 3), (3, 2)):
        assert 0 <= real[source, to] - costs.links[source, to].count <= SIGNALS
    held = Session(captured, strategy)._read
    assert [costs.held(worker) for worker in range(4)] == [
        sum(tensor.shape.num_elements() * tensor.dtype.size for tensor in mine.values() if tensor is not None)
        for mine in held
    ]


@pytest.mark.usefixtures("in_float64")
def test_collectives_of_a_transformer_block():
    model = transformer(keras.optimizers.SGD(1e-2))
    strategy = on_mesh(model.captured.step, {"model": 2}, model.layouts(MEGATRON))
    figures = costs_of(model, strategy).figures()
    (sums,) = figures.collectives
    activations = 4 * 6 * 16 * 8  # examples, tokens, features
    assert (sums.kind, sums.axes, sums.calls, sums.sent) == ("all_reduce", ("model",), 4, PartialCount(4 * activations))
    assert (figures.examples, figures.title) == (4, "2 places on 2 workers, mesh {model: 2}")


def test_parts_of_variables_and_slots_have_their_origins():
    model = perceptron()
    strategy = on_mesh(model.captured.step, {"data": 2, "model": 2}, {"w1": "[–, model]"})
    costs = costs_of(model, strategy)
    by_name = {one.name: one for one in costs.figures().variables}
    first = by_name["w1"]
    assert (first.sharding, first.part_shape, first.bytes, first.part_bytes) == ("[–, model]", (6, 4), 384, 192)
    assert first.origin == strategy.mesh.variables[0].origin
    assert [(slot.name, slot.sharding, slot.origin, slot.part_bytes) for slot in first.slots] == [
        ("m1", "[–, model]", "propagation", 192)
    ]
    assert (by_name["b1"].sharding, by_name["b1"].origin, by_name["b1"].part_bytes) == ("[model]", "propagation", 32)
    assert by_name["w2"].part_bytes * (1 if by_name["w2"].sharding == "whole" else 2) == by_name["w2"].bytes
    step = Session(model.captured, strategy).steps[0]
    assert costs.held(0) == sum(variable.byte_size for variable in step.variables)
    assert costs.held(0) < sum(variable.byte_size for variable in model.captured.step.variables)


def test_a_place_computes_its_part_of_the_products():
    model = perceptron()
    layouts = {"w1": "[–, model]", "w2": "[model, –]"}
    whole, half = (costs_of(model, on_mesh(model.captured.step, {"model": n}, layouts)).flops.count for n in (1, 2))
    assert 0.5 * whole <= half <= 0.6 * whole


def test_without_a_batch_bytes_are_lower_bounds():
    model = perceptron()
    strategy = on_mesh(model.captured.step, {"data": 2, "model": 2}, {"w1": "[–, model]", "w2": "[model, –]"})
    figures = costs_of(model, strategy, is_fed=False).figures(["'nothing'"])
    sums, gradients = figures.collectives
    assert (sums.calls, sums.sent, figures.examples) == (1, PartialCount(0, is_least=True), None)
    assert gradients.sent == PartialCount(192 + 32 + 128)
    assert "'nothing'" in figures.caption


def test_a_rewriting_that_was_seen_is_used():
    model = perceptron()
    strategy, seen = on_mesh(model.captured.step, {"model": 2}, {"w1": "[–, model]"}), Rewriting()
    rewrite(model.captured.step, Context(strategy, 0), also=seen)
    found = mesh_costs(model.captured.step, Context(strategy, 0), shapes_of(model, strategy), seen)
    assert found.sharded is seen.sharded
    assert found.links == costs_of(model, strategy).links


def test_the_run_logs_parts_and_collectives(caplog):
    spec = ResourceSpec.from_dict({"nodes": [{"address": "localhost", "cpus": [0, 1], "workers": 2}]})
    model = perceptron()
    strategy = on_mesh(model.captured.step, {"model": 2}, {"w1": "[–, model]", "w2": "[model, –]"})
    with caplog.at_level(logging.INFO, logger="autodist"):
        log_strategy(*describe_strategy(strategy, model.captured.step, None, spec, None, shapes_of(model, strategy)))
    assert caplog.text.index("[–, model]") < caplog.text.index("all_reduce")
    assert "bytes of a place with 8 examples" in caplog.text
