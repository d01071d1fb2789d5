"""A run that continues another one keeps the strategies that `Auto` chose, if steps and workers are the same."""

from __future__ import annotations

from typing import Any

import pytest

from autodist.resources import Measurements, ResourceSpec
from autodist.runs.measuring.kept_choices import CHOICES, KeptChoices
from autodist.strategies import Auto, call_builder
from tests.unit.strategies.conftest import make_cluster, make_step

STEP = make_step({"w": (4, 2), "table": (10, 2)}, sparse=["table"])


def kept(spec: ResourceSpec) -> dict[str, Any]:
    """Returns the entries of a checkpoint of a run that has planned one step."""
    choices = KeptChoices({}, spec)
    assert choices.next_for(STEP) == b""
    assert choices.about() == {}
    choices.add(STEP, call_builder(Auto(), STEP, spec))
    return choices.about()


def test_the_same_step_gets_the_same_strategy():
    spec = make_cluster(2)
    resumed = KeptChoices(kept(spec), spec)
    found = resumed.next_for(STEP)
    strategy = call_builder(Auto(), STEP, spec.with_measurements(Measurements(chosen=found)))
    assert strategy.SerializeToString(deterministic=True) == found
    resumed.add(STEP, strategy)
    assert resumed.next_for(STEP) == b""  # the second step is new
    assert len(resumed.about()[CHOICES]) == 1


def test_other_names_of_a_worker_do_not_matter():
    renamed = make_step({"v": (4, 2), "t": (10, 2)}, sparse=["t"])
    spec = make_cluster(2)
    assert KeptChoices(kept(spec), spec).next_for(renamed)


@pytest.mark.parametrize(
    ("step", "workers"),
    [(STEP, 3), (make_step({"w": (4, 3), "table": (10, 2)}, sparse=["table"]), 2), (make_step({"w": (4, 2)}), 2)],
    ids=["another worker", "another shape", "fewer variables"],
)
def test_another_step_or_cluster_is_chosen_for_anew(step, workers):
    assert KeptChoices(kept(make_cluster(2)), make_cluster(workers)).next_for(step) == b""


def test_a_strategy_with_other_names_is_not_used():
    """The chief's script has changed. No worker has measured, so the choice is made by assumed times."""
    spec = make_cluster(2)
    chosen = KeptChoices(kept(spec), spec).next_for(STEP)
    renamed = make_step({"v": (4, 2), "t": (10, 2)}, sparse=["t"])
    strategy = call_builder(Auto(), renamed, spec.with_measurements(Measurements(chosen=chosen)))
    assert [node.variable for node in strategy.nodes] == ["v", "t"]
