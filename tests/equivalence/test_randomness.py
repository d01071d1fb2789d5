"""Random draws: unseeded batches, dropout, and equal bits in every run."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tests.equivalence.harness import Cluster, Trainings, many_threads, same_bits

pytestmark = [pytest.mark.equivalence, pytest.mark.processes, pytest.mark.slow]

UNSEEDED = Cluster("shuffle", options=("--unseeded",))


def parameters(*cases: tuple[str, str]) -> list[object]:
    """Two runs of each strategy and program."""
    return [
        pytest.param(*runs, p, id=f"{s}-{p}", marks=[pytest.mark.trains(cluster, p) for cluster in runs])
        for s, p in cases
        for runs in [many_threads(s)]
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


DROPS = many_threads("shuffle")[0]


@pytest.mark.trains(DROPS, "step_dropout")
def test_every_replica_draws_other_numbers(trainings: Trainings) -> None:
    trained = trainings.on(DROPS, "step_dropout")
    for name in ("dropped", "drawn"):
        per_worker = trained.own(name)  # by worker: steps × (an example of each replica) × features
        assert [made.shape for made in per_worker] == [(3, 2, 40)] * 2
        masks = [made[step, replica] > 0 for made in per_worker for step in range(3) for replica in range(2)]
        assert all((a != b).any() for a, b in itertools.combinations(masks, 2)), name
        assert all(0 < mask.sum() < 40 for mask in masks), name


CASES = parameters(
    *(("shuffle", program) for program in ("step_dropout", "fit_dropout", "step_repeated_ids")),
    ("ps", "step_repeated_ids"),
    ("power_sgd", "step_two_optimizers"),
)


@pytest.mark.parametrize("first, second, program", CASES)
def test_a_seeded_run_repeats_exactly_with_many_threads_repeated_ids_and_what_compressors_remember(
    first: Cluster, second: Cluster, program: str, trainings: Trainings
) -> None:
    before, after = trainings.on(first, program), trainings.on(second, program)
    for mine, other in zip(before.by_worker, after.by_worker, strict=True):
        assert mine.keys() == other.keys()
        assert not [name for name, value in mine.items() if not same_bits(value, other[name])]
