from __future__ import annotations

from collections.abc import Iterator

import pytest

from autodist.capture.keras.distribution import run_settings
from autodist.capture.keras.distribution.run_settings import RunSettings, set_run
from autodist.runs.keras_values import defer_values


@pytest.fixture
def divided_run() -> Iterator[None]:
    """A run on two devices whose strategy divides variables, so that large values of Keras's variables are deferred."""
    before = [*run_settings._current]
    defer_values()
    set_run(RunSettings(("cpu:0", "cpu:1"), divides_variables=True))
    yield
    run_settings._current[:] = before
