"""`tf.distribute` strategies are rejected at their first use."""

from __future__ import annotations

import pytest
import tensorflow as tf

from autodist.capture import other_strategies
from autodist.capture.other_strategies import require_no_strategy
from autodist.errors import CaptureError


def test_one_whose_scope_is_open_when_the_first_is_looked_at_is_refused_and_the_default_is_not() -> None:
    other_strategies._default.cache_clear()
    with tf.distribute.OneDeviceStrategy("/cpu:0").scope(), pytest.raises(CaptureError, match="OneDeviceStrategy"):
        require_no_strategy(tf.distribute.get_strategy(), "what is built here")
    require_no_strategy(tf.distribute.get_strategy(), "what is built here")
