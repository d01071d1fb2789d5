"""Checks of the distribution that is set: one that fits the run is accepted, and every other one is refused."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import keras
import pytest
from keras.distribution import DataParallel, DeviceMesh, LayoutMap, ModelParallel, set_distribution

from autodist.capture.keras.distribution import run_settings
from autodist.capture.keras.distribution.checks import (
    as_distribution,
    check_distribution,
    check_model,
    checking_distributions,
    setting_distribution,
    sharding_distribution,
)
from autodist.capture.keras.distribution.run_settings import RunSettings, set_run
from autodist.errors import StrategyError
from autodist.sharding import Mesh
from tests.versions import since_keras

MESH = Mesh.of({"batch": 1, "model": 2})
TWO = RunSettings(("cpu:0", "cpu:1"), "cluster.yml", workers=2, mesh=MESH, batch_axis="batch")


@pytest.fixture(autouse=True)
def in_a_run_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_settings, "_current", [TWO])


def model_parallel(size: int = 2, devices: Any = None, **layouts: Any) -> ModelParallel:
    layout_map = LayoutMap(DeviceMesh((1, size), ["batch", "model"], devices))
    for key, layout in layouts.items():
        layout_map[key] = layout
    return ModelParallel(layout_map=layout_map)


def dense() -> keras.Model:
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(4, name="hidden")], name="outer")


class Own(DataParallel):
    """A class of the script, which may follow other rules."""


def test_a_class_of_the_script_is_refused_with_the_fix() -> None:
    with pytest.raises(StrategyError, match=r"Own is set, and AutoDist does not support it.*Remove it .*ModelParallel"):
        check_distribution(Own())


def test_a_model_parallel_with_the_mesh_of_the_run_is_accepted() -> None:
    check_distribution(model_parallel())
    set_run(replace(TWO, mesh=None, is_chief=False))  # such a worker does not have the strategy
    check_distribution(model_parallel())
    set_run(replace(TWO, mesh=None, is_reference=True, devices=("cpu:0",)))
    check_distribution(model_parallel(4))
    check_distribution(Own())


def test_a_mesh_of_another_size_is_refused() -> None:
    with pytest.raises(StrategyError, match="has 4 places, and the run has 2 .cluster.yml"):
        check_distribution(model_parallel(4))


def test_a_mesh_in_another_order_is_refused() -> None:
    with pytest.raises(StrategyError, match=r"lists the places of the run in another order, \(1, 0\)"):
        check_distribution(model_parallel(devices=["cpu:1", "cpu:0"]))


def test_a_strategy_and_a_distribution_that_disagree_are_both_named() -> None:
    at = "cluster.yml:3: strategy.builder"
    set_run(RunSettings(TWO.devices, "cluster.yml", strategy=at))
    with pytest.raises(StrategyError, match=f"ModelParallel is set, the DeviceMesh .*{at} chooses another strategy"):
        check_distribution(model_parallel())
    check_distribution(DataParallel())
    set_run(replace(TWO, strategy=at, batch_axis="model"))
    with pytest.raises(StrategyError, match=f"the DeviceMesh .* along 'batch', and {at} has the mesh .* 'model'"):
        check_distribution(model_parallel())


def test_one_that_comes_after_the_workers_have_started_is_refused() -> None:
    set_run(replace(TWO, mesh=None))
    with pytest.raises(StrategyError, match=r"Set the distribution before AutoDist\(…\) is called, or pass it"):
        check_distribution(model_parallel())


def test_a_layout_map_stands_for_a_model_parallel() -> None:
    made = as_distribution(model_parallel()._layout_map)
    assert type(made) is ModelParallel and made.batch_dim_name == "batch"
    assert sharding_distribution(made) is made
    assert sharding_distribution(DataParallel()) is None
    with pytest.raises(StrategyError, match="The LayoutMap has no mesh"):
        as_distribution(LayoutMap(None))


def test_a_distribution_that_is_passed_as_strategy_is_set_in_the_context() -> None:
    passed = model_parallel()
    with setting_distribution(passed):
        assert keras.distribution.distribution() is passed
    assert keras.distribution.distribution() is None
    set_distribution(model_parallel())
    with (
        pytest.raises(StrategyError, match="ModelParallel is set, .* is another one, with"),
        setting_distribution(passed),
    ):
        pass


@since_keras("3.14", "keys that match whole paths alone")
def test_the_layouts_of_a_models_variables_are_checked(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "autodist")
    distribution = model_parallel(**{"hidden/kernel": (None, "model"), ".*bias": (None, "model")})
    with distribution.scope():
        model = dense()
        with pytest.raises(StrategyError, match=r"'\.\*bias'.* has 2 dimensions, and the variable \S*hidden/bias has"):
            check_model(model)
        del distribution._layout_map[".*bias"]
        distribution._layout_map[".*bias"] = ("batch",)
        check_model(model)
        check_model(model)
    assert caplog.messages == [
        "The layout-map key 'hidden/kernel' matches no variable. The path outer/hidden/kernel begins with the name of "
        "the model: write '.*/hidden/kernel'.",
    ]


def test_a_model_built_before_is_refused_by_its_first_variable() -> None:
    model = dense()
    set_distribution(model_parallel())
    first = model.weights[0].path
    with pytest.raises(StrategyError, match=f"The variable {first} was made before keras.distribution's ModelParallel"):
        check_model(model)


def test_parts_of_the_data_are_refused_where_batches_are_whole() -> None:
    parts = DataParallel(auto_shard_dataset=False)
    with pytest.raises(StrategyError, match="auto_shard_dataset=False.*Set `batch: per_worker` in the YAML"):
        check_distribution(parts)
    for run in (RunSettings(TWO.devices, workers=1), RunSettings(TWO.devices, workers=2, batch="per_worker")):
        set_run(run)
        check_distribution(parts)


def test_one_set_by_a_name_imported_before_is_refused_at_the_end() -> None:
    with pytest.raises(StrategyError, match="has 4 places"), checking_distributions():
        set_distribution(model_parallel(4))
    set_distribution(None)
    with checking_distributions(), pytest.raises(StrategyError, match="has 4 places"):
        keras.distribution.set_distribution(model_parallel(4))
