"""`jit_compile=True`: many devices train what one does, with XLA and without."""

from __future__ import annotations

import logging

import pytest

from tests.equivalence.cases.jit_compiled import TWINS
from tests.equivalence.harness import Cluster, Trainings, largest_difference

log = logging.getLogger(__name__)

MOST = 1e-9

CLUSTERS = (Cluster("shuffle", 2, 1), Cluster("shuffle", 1, 2), Cluster("ps_load_balancing", 2, 1))

CASES = [
    pytest.param(
        cluster,
        program,
        id=f"{cluster.strategy}-{cluster.shape}-{program}",
        marks=[pytest.mark.trains(where, name) for where, name in ((cluster, program), (None, program), (None, twin))],
    )
    for cluster in CLUSTERS
    for program, twin in TWINS.items()
]

pytestmark = [pytest.mark.equivalence, pytest.mark.processes, pytest.mark.slow]


@pytest.mark.parametrize("cluster, program", CASES)
def test_many_devices_train_what_one_does_with_xla_and_without(
    cluster: Cluster, program: str, trainings: Trainings
) -> None:
    trained = trainings.on(cluster, program).joined
    for reference in (program, TWINS[program]):
        difference, variable = largest_difference(trainings.alone(reference).joined, trained)
        log.info("%s-%s from %s: %.1e (%s)", cluster.strategy, program, reference, difference, variable)
        assert difference <= MOST, variable
