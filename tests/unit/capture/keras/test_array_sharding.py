"""A worker's rows of the batches that Keras makes of arrays: each worker reads its own rows of one device's batches."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import scipy.sparse
import tensorflow as tf
from keras.src.trainers.data_adapters import get_data_adapter

from autodist.batch.examples import rows_to_read, share_of
from autodist.capture.keras.own_batches import own_arrays
from autodist.reading.batch_sharding import global_batch_of

REPLICAS = [0, 1, 1, 2]
"""Three workers; a batch of 10 gives them 3, 5 and 2 examples."""

DRAWS = np.random.default_rng(0)
X, Y = DRAWS.normal(size=(27, 3)), DRAWS.integers(0, 2, 27)
SPARSE = scipy.sparse.random(27, 6, 0.3, "csr", random_state=0)

GIVEN: dict[str, dict[str, Any]] = {
    "in order": {"x": X, "y": Y, "shuffle": False},
    "shuffled": {"x": X, "y": Y, "shuffle": True},
    "shuffled within batches": {"x": X, "y": Y, "shuffle": "batch"},
    "in a nest": {"x": {"a": X, "b": (X, tf.constant(Y))}, "y": None, "shuffle": True},
    "weighted": {"x": X, "y": Y, "sample_weight": X[:, 0], "shuffle": True},
    "by class": {"x": X, "y": Y, "class_weight": {0: 1.0, 1: 3.0}, "shuffle": True},
    "sparse": {"x": SPARSE, "y": Y, "shuffle": True},
    "ragged": {"x": tf.RaggedTensor.from_row_lengths(np.arange(sum(range(27))), np.arange(27)), "shuffle": True},
    "by steps": {"x": X, "batch_size": None, "steps_per_epoch": 4, "shuffle": True},
    "fewer than replicas": {"x": X, "batch_size": 13, "shuffle": True},
}


def leaves(batch: Any) -> list[Any]:
    found = [x for x in keras.tree.flatten(batch) if x is not None]
    return [tf.sparse.to_dense(x) if isinstance(x, tf.SparseTensor) else x for x in found]


def adapter(given: dict[str, Any]) -> Any:
    return get_data_adapter(**({"batch_size": 10} | given))


ALL = {"shuffled", "fewer than replicas"}
"""Cases for each worker, of which some have no example of a batch; the others are for one worker in turn."""

WORKERS = {case: range(3) if case in ALL else [k % 3] for k, case in enumerate(GIVEN)}


@pytest.mark.parametrize("case", GIVEN)
def test_workers_read_what_one_device_does(case: str) -> None:
    keras.utils.set_random_seed(1)
    dataset = adapter(GIVEN[case]).get_tf_dataset()
    expected = [leaves(batch) for _ in range(2) for batch in dataset]
    for worker in WORKERS[case]:
        keras.utils.set_random_seed(1)
        own = own_arrays(adapter(GIVEN[case]), rows_to_read(REPLICAS, worker))
        assert own is not None
        count = 0
        for _ in range(2):
            iterator = iter(own)
            for batch in iterator:
                whole = global_batch_of(iterator)
                assert whole is not None
                assert whole.examples == expected[count][0].shape[0]
                share = share_of(whole.examples, REPLICAS, worker)
                end = share.start + share.size if share.size else None  # a row that does not count
                for mine, all_rows in zip(leaves(batch), expected[count], strict=True):
                    wanted = all_rows[share.start : end] if share.size else all_rows[-1:]
                    np.testing.assert_array_equal(_dense(mine), _dense(wanted))
                count += 1
        assert count == len(expected)


def _dense(value: Any) -> Any:
    return value.to_tensor(-1, [None, 30]) if isinstance(value, tf.RaggedTensor) else value


def test_values_that_must_be_equal_on_all_workers_are_named() -> None:
    own = own_arrays(adapter(GIVEN["in a nest"]), rows_to_read(REPLICAS, 1))
    assert own is not None
    iterator = iter(own)
    next(iterator)
    whole = global_batch_of(iterator)
    assert whole is not None
    assert [name for name, _ in whole.alike] == ["x/a", "x/b/0", "x/b/1", "the order of examples"]
    np.testing.assert_array_equal(whole.alike[0][1], X.astype("float32"))


def test_a_data_set_is_none_of_arrays() -> None:
    assert own_arrays(get_data_adapter(tf.data.Dataset.range(3).batch(2)), rows_to_read(REPLICAS, 0)) is None
