"""Drawn shardings of the variables of small models: a step on a mesh equals one device, or is refused."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from math import prod

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autodist.errors import AutoDistError, RewriteError, StrategyError
from autodist.graph.parts import Variable
from autodist.proto import strategy_pb2
from tests.unit.kernels.in_one_process import Session, on_mesh
from tests.unit.kernels.shard.drawn_models import (
    CONSTRAINED,
    MODELS,
    DrawnModel,
    assert_as_expected,
    constrained,
    expected_of,
    model_of,
)

EXAMPLES = int(os.environ.get("DRAWN_SHARDINGS", "4"))
"""An example takes some seconds; set the variable for more of them, which then differ in each run.

For more than 200, `-o faulthandler_timeout=3600` lets the test take more than five minutes.
"""

MESHES: tuple[dict[str, int], ...] = ({"model": 2}, {"model": 4}, {"a": 2, "b": 2}, {"data": 2, "model": 2})


@st.composite
def divided(draw: st.DrawFn, shape: Sequence[int], sizes: Mapping[str, int]) -> list[list[str]]:
    """The axes of the dimensions of a shape: each axis divides one of them, or none."""
    axes: list[list[str]] = [[] for _ in shape]
    for name in draw(st.permutations([name for name in sizes if name != "data"])):
        lengths = [n // prod(sizes[a] for a in own) for n, own in zip(shape, axes, strict=True)]
        possible = [k for k, n in enumerate(lengths) if n and n % sizes[name] == 0]
        at = draw(st.sampled_from([*possible, None]))
        if at is not None:
            axes[at].append(name)
    return axes


@st.composite
def layouts(draw: st.DrawFn, variable: Variable, sizes: Mapping[str, int]) -> str:
    """A layout of a variable, whose dimensions are open or closed."""
    axes = draw(divided(variable.shape, sizes))
    dims = ["·".join(own) + draw(st.sampled_from(["", "?"])) if own else draw(st.sampled_from("–?")) for own in axes]
    return f"[{', '.join(dims)}]"


def _session(model: DrawnModel, strategy: strategy_pb2.Strategy) -> Session | StrategyError | RewriteError:
    try:
        return Session(model.captured, strategy)
    except (StrategyError, RewriteError) as refused:
        return refused


@pytest.mark.usefixtures("keras_in_float64")
@settings(
    max_examples=EXAMPLES,
    derandomize="DRAWN_SHARDINGS" not in os.environ,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
)
@given(st.data())
def test_a_step_equals_one_device_or_is_refused(data):
    name = data.draw(st.sampled_from(sorted(MODELS)), label="model")
    sizes = data.draw(st.sampled_from(MESHES), label="mesh")
    model = model_of(name)
    variables = [variable for variable in model.captured.step.variables if variable.shape]
    chosen = data.draw(st.lists(st.sampled_from(variables), unique_by=lambda v: v.name), label="variables")
    found = {variable.name: data.draw(layouts(variable, sizes), label=variable.name) for variable in chosen}
    devices = data.draw(st.sampled_from((1, 2, prod(sizes.values()))), label="devices of a worker")
    session = _session(model, on_mesh(model.captured.step, sizes, found, devices=devices))
    if isinstance(session, AutoDistError):
        assert any(one in str(session) for one in found), session
        return
    workers = 1 if devices == prod(sizes.values()) else None
    assert_as_expected(session.train(model.batches), expected_of(name, sizes.get("data", 1), workers))


@settings(
    max_examples=EXAMPLES // 2,
    derandomize="DRAWN_SHARDINGS" not in os.environ,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(st.data())
def test_constrained_tensors_equal_one_device(data):
    sizes = data.draw(st.sampled_from(MESHES), label="mesh")
    names = data.draw(st.lists(st.sampled_from(sorted(CONSTRAINED)), min_size=1, unique=True), label="tensors")
    batch = st.sampled_from([None, "?", "data"] if "data" in sizes else [None, "?"])
    found = {name: (data.draw(batch), *data.draw(divided(CONSTRAINED[name], sizes), label=name)) for name in names}
    model = constrained(found, data.draw(st.booleans(), label="is weighed"))
    devices = data.draw(st.sampled_from((1, 2, prod(sizes.values()))), label="devices of a worker")
    session = Session(model.captured, on_mesh(model.captured.step, sizes, {}, devices=devices))
    assert_as_expected(session.train(model.batches), model.expected(1))


def test_the_axis_of_the_batch_is_allowed_if_the_rows_of_the_gradient_are_unknown():
    model = constrained({"hidden": ("data", None, "model")}, is_weighed=False)
    session = Session(model.captured, on_mesh(model.captured.step, {"data": 2, "model": 2}, {}))
    assert_as_expected(session.train(model.batches), model.expected(1))


@pytest.mark.usefixtures("keras_in_float64")
@pytest.mark.parametrize("layout", ["[model]", "[model?]"])
def test_the_state_of_a_random_generator_is_not_divided(layout):
    model = model_of("dropout")
    [seed] = [variable.name for variable in model.captured.step.variables if variable.is_seed]
    with pytest.raises(StrategyError, match=f"divides {seed}, the state of a random generator"):
        Session(model.captured, on_mesh(model.captured.step, {"data": 2, "model": 2}, {seed: layout}))


@pytest.mark.usefixtures("keras_in_float64")
@pytest.mark.parametrize(("devices", "workers"), [(2, None), (4, 1)])
def test_a_worker_with_the_whole_batch_draws_for_all_examples(devices, workers):
    model = model_of("draws")
    strategy = on_mesh(model.captured.step, {"data": 2, "model": 2}, {"w": "[–, model]"}, devices=devices)
    assert_as_expected(Session(model.captured, strategy).train(model.batches), expected_of("draws", 2, workers))


@pytest.mark.usefixtures("keras_in_float64")
@pytest.mark.parametrize(
    ("name", "sizes", "layouts"),
    [
        ("lstm", {"model": 2}, {"loop/lstm_cell/kernel": "[–, model]", "loop/lstm_cell/bias": "[model]"}),
        ("lstm", {"data": 2, "model": 2}, {"head/kernel": "[model, –]"}),
        ("loss scaling", {"model": 4}, {"w": "[model, –]"}),
        ("reductions", {"model": 2}, {"w": "[–, model]"}),
        ("shapes", {"model": 2}, {"w": "[–, model]"}),
    ],
    ids=["read in a loop", "a list of partial sums", "written in a branch", "any along a divided dimension", "shapes"],
)
def test_ops_on_divided_values(name, sizes, layouts):
    model = model_of(name)
    found = Session(model.captured, on_mesh(model.captured.step, sizes, layouts)).train(model.batches)
    assert_as_expected(found, expected_of(name, sizes.get("data", 1)))
