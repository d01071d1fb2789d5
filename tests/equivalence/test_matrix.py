"""Every strategy, front end, number of workers and replicas, model and optimizer, in pairs: they train as one device
does.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import pytest

from tests.equivalence.harness import Cluster, Trainings, largest_difference
from tests.equivalence.matrix import Combination, choose

log = logging.getLogger(__name__)

MOST = 1e-9
"""In float64, so that rounding cannot hide a wrong scale or a lost row."""


@dataclass(frozen=True)
class Case:
    """One combination."""

    combination: Combination

    @property
    def cluster(self) -> Cluster:
        strategy, _, shape, _, _ = self.combination
        workers, replicas = map(int, shape.split("x"))
        return Cluster(strategy, workers, replicas)

    @property
    def program(self) -> str:
        _, front, _, model, optimizer = self.combination
        return f"{front}-{model}-{optimizer}"

    @property
    def reference(self) -> str:
        """The program that does the same on one device; under a layer's batch normalisation it takes the same parts.

        The graphs normalise by hand, by moments of the whole batch.
        """
        is_in_parts = "convolution" in self.combination and "graph" not in self.combination
        return f"{self.program}-in-{self.cluster.shape}" if is_in_parts else self.program

    @property
    def parameter(self) -> object:
        marks = [pytest.mark.trains(self.cluster, self.program), pytest.mark.trains(None, self.reference)]
        return pytest.param(self, id="-".join(self.combination), marks=marks)


CASES = [Case(combination) for combination in choose()]

pytestmark = [pytest.mark.equivalence, pytest.mark.processes, pytest.mark.slow]


@pytest.mark.feature("fit", "model: embeddings")
@pytest.mark.feature("function", "model: embeddings")
@pytest.mark.feature("session", "model: embeddings")
@pytest.mark.feature("fit", "model: convolutions, batch normalisation of a replica's part")
@pytest.mark.feature("function", "model: convolutions, batch normalisation of a replica's part")
@pytest.mark.feature("session", "model: convolutions, batch normalisation of a replica's part")
@pytest.mark.parametrize("case", [case.parameter for case in CASES])
def test_many_devices_train_what_one_does(case: Case, trainings: Trainings) -> None:
    expected = trainings.alone(case.reference).joined
    difference, variable = largest_difference(expected, trainings.on(case.cluster, case.program).joined)
    log.info("%s: %.1e (%s)", "-".join(case.combination), difference, variable)
    assert difference <= MOST, variable
