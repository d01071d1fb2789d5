"""What is drawn: batches that nobody seeded, dropout, and the same bits in every run."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tests.equivalence.harness import Cluster, Trainings, same_bits

pytestmark = [pytest.mark.equivalence, pytest.mark.processes, pytest.mark.slow]

UNSEEDED = Cluster("shuffle", options=("--unseeded",))
MANY_THREADS = [
    Cluster(strategy, options=("--cores", "8"), run=run) for strategy in ("shuffle", "ps") for run in (0, 1)
]
"""Each of two workers has four threads; every strategy runs twice."""

SEEDED = [Cluster("shuffle", run=run) for run in (0, 1)]


def parameters(clusters: list[Cluster], *programs: str) -> list[object]:
    """Every two neighbours of `clusters`, with what they train."""
    pairs = zip(clusters[::2], clusters[1::2], strict=True)
    return [
        pytest.param(a, b, p, id=f"{a.strategy}-{p}", marks=[pytest.mark.trains(c, p) for c in (a, b)])
        for a, b in pairs
        for p in programs
    ]


@pytest.mark.parametrize(
    "program",
    [pytest.param(p, marks=pytest.mark.trains(UNSEEDED, p)) for p in ("fit_shuffled_arrays", "fit_shuffled_dataset")],
)
def test_without_a_seed_all_workers_shuffle_alike_and_use_every_example_once(
    program: str, trainings: Trainings
) -> None:
    values = trainings.on(UNSEEDED, program).shared  # the same on all workers, bit for bit
    assert (values["seen"] == 1).all()
    sizes = np.unique(values["steps"], return_counts=True)[1]
    assert sizes.tolist() == [8, 8, 8, 8, 8, 8, 2]
    assert (np.diff(values["steps"]) < 0).any(), "the examples were used in their own order"


@pytest.mark.trains(SEEDED[0], "step_dropout")
def test_every_replica_draws_other_numbers(trainings: Trainings) -> None:
    trained = trainings.on(SEEDED[0], "step_dropout")
    for name in ("dropped", "drawn"):
        per_worker = trained.own(name)  # by worker: steps × (an example of each replica) × features
        assert [made.shape for made in per_worker] == [(3, 2, 40)] * 2
        masks = [made[step, replica] > 0 for made in per_worker for step in range(3) for replica in range(2)]
        assert all((a != b).any() for a, b in itertools.combinations(masks, 2)), name
        assert all(0 < mask.sum() < 40 for mask in masks), name


@pytest.mark.parametrize("first, second, program", parameters(SEEDED, "step_dropout", "fit_dropout"))
def test_a_seeded_run_repeats_exactly(first: Cluster, second: Cluster, program: str, trainings: Trainings) -> None:
    assert_repeats(first, second, program, trainings)


@pytest.mark.parametrize("first, second, program", parameters(MANY_THREADS, "step_repeated_ids"))
def test_repeated_ids_and_many_threads_leave_the_same_bits_on_all_workers_and_in_every_run(
    first: Cluster, second: Cluster, program: str, trainings: Trainings
) -> None:
    assert_repeats(first, second, program, trainings)


def assert_repeats(first: Cluster, second: Cluster, program: str, trainings: Trainings) -> None:
    before, after = trainings.on(first, program), trainings.on(second, program)
    for mine, other in zip(before.by_worker, after.by_worker, strict=True):
        assert not [name for name, value in mine.items() if not same_bits(value, other[name])]
