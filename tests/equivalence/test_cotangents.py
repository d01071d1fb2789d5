"""Steps that use cotangents train as on one device, since every cotangent equals one device's."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

from tests.equivalence.harness import Cluster, Trainings, largest_difference

log = logging.getLogger(__name__)

MOST = 1e-9

HALF = 1e-3
"""Sums of float16 that are rounded in another order: their last bit is 1e-3 of them, a step moves weights by less."""

BY_CLUSTER = {
    Cluster("shuffle", run=2): ("step_cotangents_looked_at", "fit_clipped_cotangents", "graph_fetched_cotangents"),
    Cluster("ring", replicas=1): ("step_cotangents_clip_per_example",),
    Cluster("ps_load_balancing", run=2): ("step_cotangents_adversarial",),
    Cluster("partitioned_ps", replicas=1): ("step_cotangents_two_groups",),
}
"""All other steps, in all layouts, train in one process (unit/kernels/replicate/reductions/test_loss_scales.py)."""


def _case(cluster: Cluster, program: str) -> Any:
    marks = [pytest.mark.trains(cluster, program), pytest.mark.trains(None, program)]
    return pytest.param(cluster, program, id=f"{cluster.strategy}-{cluster.shape}-{program}", marks=marks)


pytestmark = [pytest.mark.equivalence, pytest.mark.processes, pytest.mark.slow]


@pytest.mark.feature("fit", "loss: gradients clipped within the backward pass")
@pytest.mark.parametrize("cluster, program", [_case(c, p) for c, programs in BY_CLUSTER.items() for p in programs])
def test_many_devices_train_what_one_does(cluster: Cluster, program: str, trainings: Trainings) -> None:
    difference, name = largest_difference(trainings.alone(program).joined, trainings.on(cluster, program).joined)
    log.info("%s-%s-%s: %.1e (%s)", cluster.strategy, cluster.shape, program, difference, name)
    assert difference <= MOST, name


@pytest.mark.feature("fit", "precision: `mixed_float16`")
@pytest.mark.parametrize("cluster, program", [_case(Cluster("shuffle", replicas=1), "fit_half_precision")])
def test_half_precision_overflows_where_one_device_does(cluster: Cluster, program: str, trainings: Trainings) -> None:
    expected, found = trainings.alone(program).shared, trainings.on(cluster, program).shared
    np.testing.assert_array_equal(found["scale"], expected["scale"])
    difference, name = largest_difference(expected, found)
    log.info("%s-%s: %.1e (%s)", cluster.shape, program, difference, name)
    assert difference <= HALF, name
