"""A run that continues another one keeps the strategies of `Auto`, if steps, workers and options are the same."""

from __future__ import annotations

from typing import Any

import pytest

from autodist.resources import Measurements, ResourceSpec
from autodist.runs.measuring.kept_choices import CHOICES, KeptChoices
from autodist.strategies import Auto, Override, OverrideVariables, UseParameterServer, call_builder
from tests.unit.strategies.conftest import PlannedStep, make_cluster, make_step

STEP = make_step({"w": (4, 2), "table": (10, 2)}, sparse=["table"])


def kept(spec: ResourceSpec) -> dict[str, Any]:
    """Returns the entries of a checkpoint of a run that has planned one step."""
    auto = Auto()
    choices = KeptChoices({}, spec, auto)
    assert choices.next_for(STEP) == b""
    assert choices.about() == {}
    choices.add(STEP, call_builder(auto, STEP, spec))
    return choices.about()


def test_the_same_step_gets_the_same_strategy():
    spec = make_cluster(2)
    resumed = KeptChoices(kept(spec), spec, Auto())
    found = resumed.next_for(STEP)
    strategy = call_builder(Auto(), STEP, spec.with_measurements(Measurements(chosen=found)))
    assert strategy.SerializeToString(deterministic=True) == found
    resumed.add(STEP, strategy)
    assert resumed.next_for(STEP) == b""  # the second step is new
    assert len(resumed.about()[CHOICES]) == 1


def test_overrides_apply_once_to_a_kept_strategy():
    spec = make_cluster(2)
    builder = OverrideVariables(Auto(), (Override("w", UseParameterServer(owner=1)),))
    first = call_builder(builder, STEP, spec)
    chosen = first.SerializeToString(deterministic=True)
    again = call_builder(builder, STEP, spec.with_measurements(Measurements(chosen=chosen)))
    assert again.SerializeToString(deterministic=True) == chosen


@pytest.mark.parametrize(
    ("step", "workers", "auto"),
    [
        (STEP, 3, Auto()),
        (make_step({"w": (4, 3), "table": (10, 2)}, sparse=["table"]), 2, Auto()),
        (make_step({"v": (4, 2), "table": (10, 2)}, sparse=["table"]), 2, Auto()),
        (make_step({"w": (4, 2)}), 2, Auto()),
        (STEP, 2, Auto(allow=("staleness",))),
    ],
    ids=["another worker", "another shape", "another name", "fewer variables", "other options"],
)
def test_what_differs_is_chosen_again(step: PlannedStep, workers: int, auto: Auto):
    assert KeptChoices(kept(make_cluster(2)), make_cluster(workers), auto).next_for(step) == b""
