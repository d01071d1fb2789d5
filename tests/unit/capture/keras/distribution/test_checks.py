"""Checks of the distribution that is set: the most precise error comes first, and every other one is refused too."""

from __future__ import annotations

import logging
from typing import Any

import keras
import pytest
from keras.distribution import DataParallel, DeviceMesh, LayoutMap, ModelParallel, set_distribution

from autodist.capture.keras.distribution import run_settings
from autodist.capture.keras.distribution.checks import check_distribution, check_model, checking_distributions
from autodist.capture.keras.distribution.run_settings import RunSettings, set_run
from autodist.errors import StrategyError

TWO = RunSettings(("cpu:0", "cpu:1"), "cluster.yml", workers=2)
SUPPORTED_NEITHER = ["keras.distribution's ModelParallel is not supported yet, also without this fault."]


@pytest.fixture(autouse=True)
def in_a_run_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_settings, "_current", [TWO])


def model_parallel(size: int = 2, **layouts: Any) -> ModelParallel:
    layout_map = LayoutMap(DeviceMesh((1, size), ["batch", "model"]))
    for key, layout in layouts.items():
        layout_map[key] = layout
    return ModelParallel(layout_map=layout_map)


def dense() -> keras.Model:
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(4, name="hidden")], name="outer")


class Own(DataParallel):
    """A class of the script, which may follow other rules."""


@pytest.mark.parametrize("make", [model_parallel, lambda: model_parallel()._layout_map, Own])
def test_what_shards_a_model_is_refused_with_the_fix(make: Any) -> None:
    one = make()
    with pytest.raises(StrategyError, match=rf"{type(one).__name__} is set, and AutoDist does not support it yet.*Rem"):
        check_distribution(one)


def test_a_fault_of_the_mesh_comes_first_and_says_that_none_is_supported() -> None:
    with pytest.raises(StrategyError, match="has 4 places, and the run has 2 .cluster.yml") as raised:
        check_distribution(model_parallel(4))
    assert raised.value.__notes__ == SUPPORTED_NEITHER


def test_a_strategy_and_a_distribution_that_disagree_are_both_named() -> None:
    set_run(RunSettings(TWO.devices, "cluster.yml", strategy="cluster.yml:3: strategy.builder"))
    with pytest.raises(StrategyError, match=r"ModelParallel is set, the DeviceMesh .*cluster.yml:3: strategy.builder"):
        check_distribution(model_parallel())
    check_distribution(DataParallel())


def test_the_layouts_of_a_models_variables_are_checked(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "autodist")
    distribution = model_parallel(**{"hidden/kernel": (None, "model"), ".*bias": (None, "model")})
    with distribution.scope():
        model = dense()
        with pytest.raises(StrategyError, match=r"'\.\*bias'.* has 2 dimensions, and the variable \S*hidden/bias has"):
            check_model(model)
        del distribution._layout_map[".*bias"]
        with pytest.raises(StrategyError, match="ModelParallel is set"):
            check_model(model)
    assert caplog.messages == [
        "The layout-map key 'hidden/kernel' matches no variable. The path outer/hidden/kernel begins with the name of "
        "the model: write '.*/hidden/kernel'."
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
    with pytest.raises(StrategyError, match="ModelParallel is set"), checking_distributions():
        set_distribution(model_parallel())
    set_distribution(None)
    with checking_distributions(), pytest.raises(StrategyError, match="ModelParallel is set"):
        keras.distribution.set_distribution(model_parallel())
