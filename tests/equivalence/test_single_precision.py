"""In float32 many devices differ from one only by rounding: at most ten times the rounding floor."""

from __future__ import annotations

import logging

import pytest

from tests.equivalence.cases.permutations import PERMUTATIONS
from tests.equivalence.harness import Cluster, Trainings, largest_difference

log = logging.getLogger(__name__)

CLUSTER = Cluster("shuffle", workers=2, replicas=2)
PROGRAMS = ("keras-mlp-adam-float32", "function-embedding-momentum-float32")
NORMALISED = ("function-convolution-momentum",)
"""Batch normalisation, which is one op here and arithmetic on one device, over the same parts of the batch."""

REFERENCES = {program: program for program in PROGRAMS}
REFERENCES |= {f"{name}-float32": f"{name}-in-{CLUSTER.shape}-float32" for name in NORMALISED}

CASES = [
    pytest.param(
        program,
        marks=[
            pytest.mark.trains(CLUSTER, program),
            pytest.mark.trains(None, reference, *(f"{reference}-permuted-{k}" for k in range(PERMUTATIONS))),
        ],
    )
    for program, reference in REFERENCES.items()
]

pytestmark = [pytest.mark.equivalence, pytest.mark.processes, pytest.mark.slow]


@pytest.mark.parametrize("program", CASES)
def test_within_ten_times_the_rounding_floor(program: str, trainings: Trainings) -> None:
    reference = REFERENCES[program]
    expected = trainings.alone(reference).joined
    permuted = [trainings.alone(f"{reference}-permuted-{k}").joined for k in range(PERMUTATIONS)]
    floor = max(largest_difference(expected, values)[0] for values in permuted)
    difference, variable = largest_difference(expected, trainings.on(CLUSTER, program).joined)
    log.info("%s: %.1e (%s), floor %.1e", program, difference, variable, floor)
    assert 0 < floor < 1e-3, "the measure itself"
    assert difference <= 10 * floor, variable
