"""Ownership: what an update keeps beside a variable stands with it."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from autodist.kernels import find_placements
from tests.unit.kernels.dense_steps import dense_step
from tests.unit.kernels.in_one_process import capture, plan

pytestmark = pytest.mark.usefixtures("keras_in_float64")


@pytest.mark.parametrize("clip", [{}, {"global_clipnorm": 0.1}])
def test_a_slot_that_is_read_before_it_is_written_stands_with_its_variable(clip):
    """Lion's momentum is written from all gradients, where these are clipped together, and serves one variable."""
    captured = capture(dense_step(keras.optimizers.Lion(0.01, **clip)), np.ones((4, 4)))
    placements = find_placements(captured.item, plan(captured.item, 2, 1, {"weight_4": 0, "weight_5": 1}))
    owners = {name.rpartition("/")[2]: placement.owners for name, placement in placements.items()}
    assert owners["weight_4_momentum"] == owners["weight_4"] == (0,)
    assert owners["weight_5_momentum"] == owners["weight_5"] == (1,)
    assert owners["iteration"] == owners["learning_rate"] == (-1,)
