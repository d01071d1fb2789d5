"""What unit tests share."""

from __future__ import annotations

from collections.abc import Iterator

import keras
import pytest


@pytest.fixture
def keras_in_float64() -> Iterator[None]:
    """Keras's layers and optimizers are made in float64, from one seed."""
    before, policy = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")  # Keras fixes it where it is first asked for
    keras.utils.set_random_seed(1)
    yield
    keras.config.set_floatx(before)
    keras.config.set_dtype_policy(policy)
