"""A script's custom compressor is accepted, logged, counted and run like a built-in one."""

from __future__ import annotations

import io
from dataclasses import dataclass

import numpy as np
import pytest
import tensorflow as tf
from rich.console import Console

from autodist.compressors import Compressor, Float16, register_compressor, registered_compressors
from autodist.errors import StrategyError
from autodist.proto import strategy_pb2
from autodist.resources import ResourceSpec
from autodist.strategies import AllReduce, check_strategy, chosen_builder, strategy_table, traffic
from autodist.strategies.variables import synced_variables
from tests.unit.compressors.own_compressors import FixedPoint, Unregistered
from tests.unit.kernels.compressed_models import given_gradient
from tests.unit.kernels.in_one_process import capture, plan, rewritten, train
from tests.unit.kernels.wire import sent_bytes

MODULE = FixedPoint.__module__
MACHINES = {"nodes": [{"address": "10.0.0.1", "chief": True, "cpus": [0]}, {"address": "10.0.0.2", "cpus": [0]}]}

RNG = np.random.default_rng(3)
BATCHES = [RNG.integers(-99, 99, (8, 5, 7)).astype("float64") for _ in range(4)]
TRAINED = -np.sum([batch.mean(0) for batch in BATCHES], 0)
"""By one device. Each worker's share of a gradient is a multiple of an eighth."""


def captured():
    return capture(given_gradient(tf.Variable(np.zeros((5, 7)), name="v")), BATCHES[0])


def trained(compressor, workers, **more):
    step = captured()
    return train(step, plan(step.step, workers, compressor=compressor, **more), [(b,) for b in BATCHES]).variable("v")


@pytest.mark.parametrize("compressor", [FixedPoint(), Unregistered(), FixedPoint(8, error_feedback=True)])
@pytest.mark.parametrize(("workers", "servers"), [(2, 0), (3, 0), (2, 1)])
def test_it_trains_as_one_device_where_it_loses_nothing(compressor, workers, servers):
    np.testing.assert_allclose(trained(compressor, workers, servers=servers), TRAINED, rtol=0, atol=1e-13)


def test_its_options_travel_with_the_strategy():
    assert np.abs(trained(FixedPoint(steps=1), 2) - TRAINED).max() > 0.1
    fed = trained(FixedPoint(steps=1, error_feedback=True), 2)
    assert 0 < np.abs(fed - TRAINED).max() <= 2 * 0.5  # each of two workers owes at most half a whole number


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("FIXED_POINT", FixedPoint()),
        ({"kind": "FIXED_POINT", "steps": 32}, FixedPoint(32)),
        (f"{MODULE}.Unregistered", Unregistered()),
        ({"kind": f"{MODULE}.Unregistered", "error_feedback": True}, Unregistered(error_feedback=True)),
    ],
)
def test_it_is_named_as_ours_are(given, meant):
    assert chosen_builder({"builder": "AllReduce", "compressor": given}, None) == AllReduce(compressor=meant)
    assert AllReduce(compressor=given).compressor == meant
    assert Compressor.from_message(meant.to_message()) == meant


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            "FIXED_POINTS",
            "no compressor named FIXED_POINTS. Did you mean FIXED_POINT[?].*my_package.MyCompressor",
        ),
        (f"{MODULE}.Nothing", f"The module {MODULE} has no Nothing"),
        (f"{MODULE}.tf", f"{MODULE}.tf is not a compressor but a module; a compressor is a frozen dataclass that"),
        (
            f"{MODULE}.Dense",
            "Dense is not a compressor but a class that is not one; a compressor is a frozen dataclass",
        ),
        ({"kind": "FIXED_POINT", "step": 2}, "compressor has no option step. Did you mean steps[?]"),
        ({"kind": "FIXED_POINT", "steps": "many"}, "steps is 'many', which is not allowed"),
    ],
)
def test_a_class_that_is_no_compressor_is_refused(given, said):
    with pytest.raises(StrategyError, match=said):
        chosen_builder({"builder": "AllReduce", "compressor": given}, None)


def test_another_compressor_cannot_take_a_name_that_is_taken():
    @dataclass(frozen=True)
    class Mine(Float16):
        """Never registered."""

    with pytest.raises(StrategyError, match="A compressor named FLOAT16 is registered already, from autodist"):
        register_compressor("FLOAT16")(Mine)
    assert {"FLOAT16", "FIXED_POINT"} <= set(registered_compressors())


def test_a_message_that_cannot_be_read_is_refused():
    message = strategy_pb2.Compressor(kind="NAMED", name="FIXED_POINT", options="{")
    with pytest.raises(StrategyError, match="the options '{' of the compressor FIXED_POINT are not JSON"):
        Compressor.from_message(message)
    with pytest.raises(StrategyError, match="the compressor FIXED_POINT is .*: step is not one of them"):
        Compressor.from_message(strategy_pb2.Compressor(kind="NAMED", name="FIXED_POINT", options='{"step": 1}'))


def test_it_is_checked_counted_and_shown():
    step, machines = captured().step, ResourceSpec.from_dict(MACHINES)
    strategy = AllReduce(compressor=FixedPoint(steps=32)).build(step, machines)
    check_strategy(strategy, step, machines)
    (node,), (variable,) = strategy.nodes, synced_variables(step)
    told = traffic(variable, node, strategy.graph_config).step
    assert told == (2 * 35, 2 * 35)
    sent = [sent_bytes(item)["whole_numbers"] for item in rewritten(captured(), strategy)]
    assert sent == [2 * 40] * 2  # 35 elements, aligned
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(strategy_table(strategy, step))
    assert "AllReduce SHUFFLE FIXED_POINT steps 32" in console.export_text()


def test_it_takes_no_rows_as_ours_take_none():
    problem = FixedPoint().misfit("v", True, "float32", True)
    assert problem and problem.startswith("v has the compressor FIXED_POINT steps 64, but its gradient is sparse")
