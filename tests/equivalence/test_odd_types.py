"""Real workers train variables of many types, scalars, empty ones and unused ones as one device does."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tests.equivalence.harness import Cluster, Trainings
from tests.unit.kernels.odd_variables import CLOSE

PROGRAM, CONVOLUTIONS = "step_odd_types", "keras_bfloat16_convolutions"
RING, SHUFFLE = Cluster("ring"), Cluster("shuffle")

pytestmark = [pytest.mark.equivalence, pytest.mark.processes, pytest.mark.slow]


@pytest.mark.trains(None, PROGRAM)
@pytest.mark.trains(RING, PROGRAM)
def test_every_type_and_shape_trains_as_on_one_device(trainings: Trainings) -> None:
    """By rings; by all-reduce in one process (tests/unit/kernels/test_odd_variables.py)."""
    expected, found = trainings.alone(PROGRAM).shared, trainings.on(RING, PROGRAM).shared
    assert set(found) == set(expected) and len(found) == 10
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and found[name].shape == value.shape, name
        margin = CLOSE[tf.bfloat16 if name.startswith("brain") else tf.as_dtype(value.dtype)]
        mine, theirs = found[name].astype("float64"), value.astype("float64")
        np.testing.assert_allclose(mine, theirs, rtol=margin, atol=margin, err_msg=name)


@pytest.mark.feature("fit", "precision: `mixed_bfloat16`")
@pytest.mark.trains(None, CONVOLUTIONS)
@pytest.mark.trains(SHUFFLE, CONVOLUTIONS)
def test_convolutions_of_bfloat16_in_a_later_step_train_as_on_one_device(trainings: Trainings) -> None:
    expected, found = trainings.alone(CONVOLUTIONS).shared, trainings.on(SHUFFLE, CONVOLUTIONS).shared
    assert set(found) == set(expected) and len(found) == 4
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=0.02, atol=0.02, err_msg=name)
