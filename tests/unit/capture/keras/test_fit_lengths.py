"""The lengths of `fit`'s batches, predicted before training."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from autodist.capture.keras.call_arguments import batch_lengths

RANGE = tf.data.Dataset.range(10)
X = np.zeros((10, 2))

LENGTHS = {
    "the last is shorter": ({"x": X, "batch_size": 4}, (4, 2)),
    "all are alike": ({"x": X, "batch_size": 5}, (5,)),
    "there is one": ({"x": X, "batch_size": 16}, (10,)),
    "of Keras's own size": ({"x": np.zeros(70)}, (32, 6)),
    "of several inputs": ({"x": {"a": tf.constant(X), "b": X}, "batch_size": 3}, (3, 1)),
    "some are for validation": ({"x": X, "batch_size": 4, "validation_split": 0.3}, (4, 3)),
    "others are for validation": (
        {"x": X, "batch_size": 4, "validation_split": 0.3, "validation_data": (X, X)},
        (4, 2),
    ),
    "it may end before": ({"x": X, "batch_size": 4, "steps_per_epoch": 2}, ()),
    "a data set": ({"x": RANGE.batch(4)}, (4, 2)),
    "a data set with more behind": ({"x": RANGE.shuffle(3).batch(4).map(tf.identity).cache().prefetch(2)}, (4, 2)),
    "a data set in parallel": ({"x": RANGE.batch(4, num_parallel_calls=2)}, (4, 2)),
    "a data set that drops the rest": ({"x": RANGE.batch(4, drop_remainder=True)}, (4,)),
    "a data set without end": ({"x": RANGE.repeat().batch(4)}, (4,)),
    "a data set of unknown length": ({"x": RANGE.filter(lambda n: n > 3).batch(4)}, (4,)),
    "a data set whose batches are cut": ({"x": RANGE.batch(4).unbatch()}, ()),
    "a generator": ({"x": iter([X])}, ()),
    "nothing": ({}, ()),
}


@pytest.mark.parametrize("case", LENGTHS)
def test_the_lengths_of_batches(case):
    arguments, expected = LENGTHS[case]
    assert batch_lengths(arguments) == expected
