"""Real workers that compress gradients agree in every bit; in 16 bits they train as before."""

from __future__ import annotations

import logging
import math

import numpy as np
import pytest

from tests.equivalence.harness import Cluster, Trainings, largest_difference, many_threads

log = logging.getLogger(__name__)

MOST = {"float16": 5e-3, "power_sgd": math.inf, "top_k": math.inf}
"""Limits for the difference from one device, relative to the largest value. In so few steps PowerSGD and top-k still
hold back as much as they have sent; tests/unit/kernels shows that they reach the same loss in the end.
"""

# A worker without examples; several steps that remember together; gradients of two stages.
ONE, SEVERAL, TWO = "fit_last_batch_of_one_example", "graph_alternating_optimizers", "step_two_optimizers"

PROGRAMS = {"float16": (TWO,), "power_sgd": (SEVERAL, TWO), "top_k": (ONE,)}
"""Each program under a compressor that remembers; all three remember by the same code."""

CLUSTERS = {strategy: Cluster(strategy) for strategy in PROGRAMS} | {"power_sgd": many_threads("power_sgd")[0]}
"""One is trained for `test_randomness`, too."""

CASES = [
    pytest.param(strategy, program, marks=[pytest.mark.trains(c, program) for c in (CLUSTERS[strategy], None)])
    for strategy, programs in PROGRAMS.items()
    for program in programs
]

pytestmark = [pytest.mark.equivalence, pytest.mark.processes, pytest.mark.slow]


@pytest.mark.parametrize("strategy, program", CASES)
def test_workers_agree_in_what_they_compress(strategy: str, program: str, trainings: Trainings) -> None:
    found = trainings.on(CLUSTERS[strategy], program).joined
    difference, variable = largest_difference(trainings.alone(program).joined, found)
    log.info("%s-%s: %.1e (%s)", strategy, program, difference, variable)
    assert all(np.isfinite(value).all() for value in found.values())
    assert difference > 1e-9  # something was lost, so something was compressed
    assert difference <= MOST[strategy], variable
