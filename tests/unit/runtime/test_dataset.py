"""Each worker's part of the global batches of a data set."""

from __future__ import annotations

import json
import logging
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from autodist.errors import CaptureError, UnevenBatchError
from autodist.runtime.dataset import DistributedDataset

ROWS = [[1, 0, 2], [], [3], [4, 5, 0], [6]]


def parts(dataset: Any) -> list[list[Any]]:
    """Of a worker with one replica and a worker with two."""
    return [list(DistributedDataset(dataset, [0, 1, 1], worker)) for worker in (0, 1)]


def test_rows_are_dealt_out_in_order_and_scalars_go_to_all() -> None:
    (mine,), (theirs,) = parts([{"x": np.arange(5), "rate": 0.5}])
    assert (mine["x"].tolist(), mine["rate"]) == ([0, 1], 0.5)
    assert (theirs["x"].tolist(), theirs["rate"]) == ([2, 3, 4], 0.5)


@pytest.mark.parametrize("batches", [[np.arange(4)], tf.data.Dataset.from_tensors(tf.range(4))])
@pytest.mark.parametrize("is_taken", [False, True])
def test_a_batch_that_a_function_takes_while_it_is_traced_is_refused(batches: Any, is_taken: bool) -> None:
    """It became a constant: every call of the function used the first batch."""
    iterator = iter(DistributedDataset([*batches, *batches], [0, 1], 0))
    if is_taken:
        next(iterator)
    with pytest.raises(CaptureError, match=r"keep this one for all of its calls.*`step\(next\(iterator\)\)`"):
        tf.function(lambda: next(iterator))()


def test_sparse_and_ragged_batches_are_dealt_out_by_their_examples() -> None:
    ragged = tf.ragged.constant(ROWS)
    sparse = ragged.to_sparse()
    (mine,), (theirs,) = parts(tf.data.Dataset.from_tensors((ragged, sparse, tf.range(5))))
    for part, rows in ((mine, ROWS[:2]), (theirs, ROWS[2:])):
        assert part[0].to_list() == rows
        assert tf.RaggedTensor.from_sparse(part[1]).to_list() == rows
        assert part[1].shape == [len(rows), 3]
        assert len(part[2]) == len(rows)


def test_arrays_with_different_numbers_of_rows_are_dealt_out_each_by_its_own() -> None:
    (mine,), (theirs,) = parts([(tf.ragged.constant(ROWS), np.arange(3))])
    assert (mine[0].to_list(), mine[1].tolist()) == (ROWS[:2], [0])
    assert (theirs[0].to_list(), theirs[1].tolist()) == (ROWS[2:], [1, 2])


def test_a_replica_needs_rows_of_each() -> None:
    with pytest.raises(UnevenBatchError, match="array 0 has 5, array 1 has 2.*each of 3 replicas needs.*array 1"):
        parts([(tf.ragged.constant(ROWS), np.zeros((2, 2)))])


def shuffled() -> DistributedDataset:
    tf.random.set_seed(3)
    return DistributedDataset(tf.data.Dataset.range(10).shuffle(10).batch(2), [0], 0)


@pytest.mark.parametrize("taken", [0, 2, 5])
def test_a_loop_goes_on_where_another_process_was(taken: int) -> None:
    first, second = shuffled(), shuffled()
    epochs = [[b.numpy().tolist() for b in first] for _ in range(2)]
    assert epochs[0] != epochs[1]
    under_way = iter(first)
    for _ in range(taken):
        next(under_way)
    place = first.serialize()
    expected = [b.numpy().tolist() for b in (under_way if taken else first)]
    second.deserialize(place)
    assert [b.numpy().tolist() for b in second] == expected
    assert [b.numpy().tolist() for b in second] == [b.numpy().tolist() for b in first]


@pytest.mark.parametrize(
    "made",
    [
        lambda numbers: numbers.shuffle(10).shuffle(4),
        lambda numbers: numbers.shuffle(10).prefetch(1).interleave(lambda k: tf.data.Dataset.range(k, k + 2)),
        lambda numbers: numbers.shuffle(10).repeat(2),
        lambda numbers: numbers.shuffle(10).take(3).concatenate(numbers.shuffle(10)).shuffle(2),
    ],
    ids=["twice", "of files", "repeated", "joined"],
)
def test_late_and_repeated_draws_equal_those_of_finished_epochs(made) -> None:
    def begin() -> DistributedDataset:
        tf.random.set_seed(5)
        return DistributedDataset(made(tf.data.Dataset.range(10)).batch(4), [0], 0)

    first, second = begin(), begin()
    for _ in range(2):
        list(first)
    under_way = iter(first)
    next(under_way)
    second.deserialize(first.serialize())
    assert [b.numpy().tolist() for b in second] == [b.numpy().tolist() for b in under_way]
    assert [b.numpy().tolist() for b in second] == [b.numpy().tolist() for b in first]


def test_a_loop_that_was_left_has_ended() -> None:
    dataset = DistributedDataset([np.arange(2)] * 5, [0], 0)
    for _ in dataset:
        break
    place = json.loads(dataset.serialize())
    assert (place["ended"], place["taken"]) == (1, 0)


def test_a_place_in_a_data_set_of_another_seed_is_told(caplog: pytest.LogCaptureFixture) -> None:
    first = shuffled()
    tf.random.set_seed(4)
    second = DistributedDataset(tf.data.Dataset.range(10).shuffle(10), [0], 0)
    with caplog.at_level(logging.WARNING, "autodist"):
        second.deserialize(first.serialize())
    assert "under the seed 4, but under 3 in the run that saved its position" in caplog.text
