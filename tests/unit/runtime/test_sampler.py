"""A global order of records: batches do not depend on the number of workers, and no worker reads another's records."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from autodist.runtime.sampler import Sampler


def sampler(records: int = 11, batch: int = 4, seed: int | None = 3, workers: int = 1, worker: int = 0) -> Sampler:
    return Sampler(records, batch, seed, False, range(workers), worker)


def epoch(sampler: Sampler) -> list[list[int]]:
    return [numbers.tolist() for numbers in sampler]


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 30), st.integers(1, 9), st.integers(1, 5))
def test_parts_of_workers_are_the_batches_of_one(records: int, batch: int, workers: int) -> None:
    alone = sampler(records, batch)
    parts = [sampler(records, batch, workers=workers, worker=w) for w in range(workers)]
    for _ in range(2):
        expected = epoch(alone)
        assert sorted(n for numbers in expected for n in numbers) == list(range(records))
        found = zip(*(epoch(part) for part in parts), strict=True)
        assert [[n for part in of_one_batch for n in part] for of_one_batch in found] == expected


def test_each_epoch_has_its_order_and_each_seed_its_own() -> None:
    first = sampler(50)
    assert len({str(epoch(one)) for one in (first, first, sampler(50, seed=4), sampler(50, seed=None))}) == 4
    assert epoch(sampler(50)) == epoch(sampler(50))


def test_without_a_seed_records_come_in_order() -> None:
    assert epoch(sampler(5, 2, None)) == [[0, 1], [2, 3], [4]]


def test_a_last_batch_may_be_left_out() -> None:
    dropping = Sampler(5, 2, None, True, [0], 0)
    assert (epoch(dropping), len(dropping)) == ([[0, 1], [2, 3]], 2)


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("taken", [0, 2, 3, 7])
def test_a_loop_goes_on_where_another_was_also_with_other_workers(taken: int, workers: int) -> None:
    first, second = sampler(), sampler(workers=workers)
    under_way = (numbers for _ in iter(int, 1) for numbers in first)
    for _ in range(taken):
        next(under_way)
    second.deserialize(first.serialize())
    skipped = sampler(workers=workers).skip(taken)
    expected = [next(under_way).tolist() for _ in range(7)]
    for found in (second, skipped):
        rest = (numbers for _ in iter(int, 1) for numbers in found)
        for numbers in expected:
            mine = next(rest).tolist()
            assert mine == numbers[: len(mine)]
            assert len(mine) == -(-len(numbers) // workers)


def test_a_place_in_another_order_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "autodist"):
        sampler(seed=4).deserialize(sampler().serialize())
    assert "records, batch and seed [11, 4, 3] is restored to one of [11, 4, 4]" in caplog.text


@pytest.mark.parametrize("arguments", [(0, 4, 1, False), (4, 0, 1, False), (3, 4, 1, True)])
def test_a_sampler_without_batches_is_refused(arguments: Any) -> None:
    with pytest.raises(ValueError, match="records"):
        Sampler(*arguments, replicas=[0], worker=0)


def test_many_records_take_no_memory() -> None:
    (numbers, *_) = (sampler(10**12, 8)._own_numbers(0, number) for number in range(2))
    assert numbers.dtype == np.int64
    assert len(set(numbers.tolist())) == 8


def test_steps_on_own_records_train_what_one_device_does() -> None:
    """A worker's mean over its records counts by their number, as a step under `ad.function` counts it."""
    x = np.random.default_rng(0).normal(size=(11, 2))

    def trained(workers: int) -> Any:
        weight = tf.Variable(np.ones(2))
        parts = [sampler(workers=workers, worker=w) for w in range(workers)]
        for _ in range(2):
            for numbers in zip(*parts, strict=True):
                sums = [2 * x[mine].T @ (x[mine] @ weight.numpy()) for mine in numbers]
                weight.assign_sub(0.1 * sum(sums) / sum(map(len, numbers)))
        return weight.numpy()

    np.testing.assert_allclose(trained(3), trained(1), rtol=1e-13)
