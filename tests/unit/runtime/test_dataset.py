"""Each worker's part of the global batches of a data set."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from autodist.errors import UnevenBatchError
from autodist.runtime.dataset import DistributedDataset

ROWS = [[1, 0, 2], [], [3], [4, 5, 0], [6]]


def parts(dataset: Any) -> list[list[Any]]:
    """Of a worker with one replica and a worker with two."""
    return [list(DistributedDataset(dataset, [0, 1, 1], worker)) for worker in (0, 1)]


def test_rows_are_dealt_out_in_order_and_scalars_go_to_all() -> None:
    (mine,), (theirs,) = parts([{"x": np.arange(5), "rate": 0.5}])
    assert (mine["x"].tolist(), mine["rate"]) == ([0, 1], 0.5)
    assert (theirs["x"].tolist(), theirs["rate"]) == ([2, 3, 4], 0.5)


def test_sparse_and_ragged_batches_are_dealt_out_by_their_examples() -> None:
    ragged = tf.ragged.constant(ROWS)
    sparse = ragged.to_sparse()
    (mine,), (theirs,) = parts(tf.data.Dataset.from_tensors((ragged, sparse, tf.range(5))))
    for part, rows in ((mine, ROWS[:2]), (theirs, ROWS[2:])):
        assert part[0].to_list() == rows
        assert tf.RaggedTensor.from_sparse(part[1]).to_list() == rows
        assert part[1].shape == [len(rows), 3]
        assert len(part[2]) == len(rows)


def test_a_batch_whose_arrays_disagree_is_refused() -> None:
    with pytest.raises(UnevenBatchError, match=r"\[4, 5\] rows"):
        parts([(tf.ragged.constant(ROWS), np.zeros((4, 2)))])
