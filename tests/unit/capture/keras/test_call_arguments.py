"""Arguments of `fit` that differ by worker are reported at once, with both values."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from autodist.capture.keras.call_arguments import comparable_arguments, require_same_arguments
from autodist.errors import ClusterError

X = np.ones((12, 3))


@pytest.mark.parametrize(
    "chief, mine, name, values",
    [
        ({"epochs": 3}, {}, "epochs", ("3", "1")),
        ({"batch_size": 4}, {"batch_size": 8}, "batch_size", ("4", "8")),
        ({}, {"steps_per_epoch": 2}, "steps_per_epoch", ("None", "2")),
        ({"validation_split": 0.2}, {}, "validation_split", ("0.2", "0.0")),
        ({"validation_freq": 2}, {"validation_freq": [1, 3]}, "validation_freq", ("2", r"\[1, 3\]")),
        ({"shuffle": False}, {}, "shuffle", ("False", "True")),
        ({"class_weight": {0: 1.0}}, {"class_weight": {0: 2.0}}, "class_weight", ("1.0", "2.0")),
        ({"x": X}, {"x": X[:8]}, "the number of examples or batches in x", ("12", "8")),
        ({"x": {"a": X}}, {"x": {"a": X[:8]}}, "the number of examples or batches in x", ("12", "8")),
        ({"x": tf.data.Dataset.range(4)}, {"x": tf.data.Dataset.range(3)}, "the number of examples", ("4", "3")),
    ],
)
def test_the_argument_that_differs_is_named_with_both_values(chief, mine, name, values):
    require_same_arguments(comparable_arguments(chief, True), comparable_arguments(dict(chief), True))
    with pytest.raises(ClusterError, match=rf"another value of {name}.*\n    chief:  .*{values[0]}.*\n.*{values[1]}"):
        require_same_arguments(comparable_arguments(chief, True), comparable_arguments(mine, True))


def test_numbers_of_numpy_are_those_of_python():
    pythons, numpys = ({"epochs": kind(3), "batch_size": kind(4)} for kind in (int, np.int64))
    require_same_arguments(comparable_arguments(pythons, True), comparable_arguments(numpys, True))


def test_workers_that_pass_data_of_their_own_make_the_same_number_of_steps():
    chief, mine = {"x": X, "batch_size": 4}, {"x": X[:8], "batch_size": 2}
    require_same_arguments(comparable_arguments(chief, False), comparable_arguments(mine, False))
    with pytest.raises(ClusterError, match="epochs"):
        require_same_arguments(comparable_arguments({"epochs": 2}, False), comparable_arguments({"epochs": 3}, False))


def test_data_of_unknown_length_says_nothing():
    told = [
        comparable_arguments({"x": iter(())}, True),
        comparable_arguments({"x": tf.data.Dataset.range(3).repeat()}, True),
    ]
    require_same_arguments(*told)
