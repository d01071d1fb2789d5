"""`jit_compile=True`: many devices train with XLA as one does without, and so as one does with it, too."""

from __future__ import annotations

import logging

import pytest

from tests.equivalence.cases.jit_compiled import TWINS
from tests.equivalence.harness import Cluster, Trainings, largest_difference

log = logging.getLogger(__name__)

MOST = 1e-9

# Pairs that contain each program and each way of combining gradients at least once.
PAIRS = (
    (Cluster("shuffle", 2, 1), "jit_fit"),
    (Cluster("shuffle", 2, 1), "jit_nested"),
    (Cluster("shuffle", 1, 2), "jit_fit_recurrent"),
    (Cluster("ps_load_balancing", 2, 1), "jit_step"),
)

CASES = [
    pytest.param(
        cluster,
        program,
        id=f"{cluster.strategy}-{cluster.shape}-{program}",
        marks=[pytest.mark.trains(where, name) for where, name in ((cluster, program), (None, TWINS[program]))],
    )
    for cluster, program in PAIRS
]

pytestmark = [pytest.mark.equivalence, pytest.mark.processes, pytest.mark.slow]


@pytest.mark.feature("fit", "precision: `jit_compile=True`")
@pytest.mark.feature("function", "precision: `jit_compile=True`")
@pytest.mark.parametrize("cluster, program", CASES)
def test_many_devices_with_xla_train_what_one_does_without(
    cluster: Cluster, program: str, trainings: Trainings
) -> None:
    alone, trained = trainings.alone(TWINS[program]).joined, trainings.on(cluster, program).joined
    difference, variable = largest_difference(alone, trained)
    log.info("%s-%s: %.1e (%s)", cluster.strategy, program, difference, variable)
    assert difference <= MOST, variable
