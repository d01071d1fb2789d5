"""Batches: the number of examples, and each worker's share of them."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from autodist.batch.examples import (
    Share,
    count_examples,
    group_rows,
    require_rows_for_all,
    share_of,
    take,
    with_a_row,
)
from autodist.errors import UnevenBatchError

REPLICAS = st.lists(st.integers(1, 3), min_size=1, max_size=4).map(
    lambda counts: [worker for worker, count in enumerate(counts) for _ in range(count)]
)


@given(st.integers(0, 40), REPLICAS)
def test_shares_follow_one_another_and_are_the_whole_batch(examples, replicas):
    shares = [share_of(examples, replicas, worker) for worker in range(replicas[-1] + 1)]
    assert sum(s.size for s in shares) == examples
    for k, share in enumerate(shares):
        assert share.start == sum(s.size for s in shares[:k])


@given(st.integers(0, 40), REPLICAS)
def test_no_replica_has_more_than_one_example_more_than_another(examples, replicas):
    parts = []
    for worker in range(replicas[-1] + 1):
        size, count = share_of(examples, replicas, worker).size, replicas.count(worker)
        parts += [size // count + (k < size % count) for k in range(count)]
    assert max(parts) - min(parts) <= 1
    assert parts == sorted(parts, reverse=True)


@given(st.integers(0, 20), REPLICAS)
def test_the_parts_of_all_workers_are_the_batch_in_order(examples, replicas):
    rows = np.arange(max(examples, 1))
    taken = []
    for worker in range(replicas[-1] + 1):
        share = share_of(examples, replicas, worker)
        mine = take(rows, 0, share)
        assert len(mine) == max(share.size, 1)
        taken += list(mine[: share.size])
    assert taken == list(range(examples))


def test_rows_are_taken_along_any_axis():
    found = take(np.arange(12).reshape(3, 4), 1, Share(1, 2))
    np.testing.assert_array_equal(found, [[1, 2], [5, 6], [9, 10]])


def test_the_whole_is_not_copied():
    rows = np.arange(4)
    assert take(rows, 0, Share(0, 4)) is rows


def test_an_empty_array_gets_a_row_that_does_not_count():
    found = with_a_row(np.zeros((2, 0, 3), np.int32), 1)
    assert (found.shape, found.dtype) == ((2, 1, 3), np.int32)
    rows = np.ones((2, 3))
    assert with_a_row(rows, 0) is rows


def test_a_row_that_does_not_count_is_one_of_its_type():
    assert tf.constant(with_a_row(np.zeros((0, 2), object), 0)).numpy().tolist() == [[b"", b""]]
    assert with_a_row(np.zeros((0, 1), "<U3"), 0).tolist() == [[""]]


def test_examples_are_counted_along_each_inputs_axis():
    assert count_examples([("x", np.zeros((5, 2)), 0), ("mask", np.zeros((3, 5)), 1)]) == 5
    assert count_examples([]) == 0


def test_inputs_of_as_many_rows_have_one_number():
    assert group_rows([]) == ()
    assert group_rows([4, 4, 4]) == (0, 0, 0)
    assert group_rows([24, 8, 8, 24, 3]) == (0, 1, 1, 0, 2)


def test_inputs_with_separate_rows_stay_separate():
    assert group_rows([8, 8, 8], (0, 1, 1)) == (0, 1, 1)
    assert group_rows([8, 7, 6], (0, 1, 1)) == (0, 1, 2)


def test_each_replica_needs_rows_of_all_that_is_apart():
    require_rows_for_all([("x", 1), ("y", 1)], (0, 0), 4)
    require_rows_for_all([("x", 24), ("y", 4)], (0, 1), 4)
    with pytest.raises(UnevenBatchError, match="x has 24, y has 3.*each of 4 replicas needs at least one row, but y"):
        require_rows_for_all([("x", 24), ("y", 3)], (0, 1), 4)


def test_inputs_that_disagree_are_named():
    with pytest.raises(UnevenBatchError, match="x has 5, y has 4.*batch_axis"):
        count_examples([("x", np.zeros(5), 0), ("y", np.zeros(4), 0)])
