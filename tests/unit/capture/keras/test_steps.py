"""The duration of an epoch in Keras's progress bar."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import keras
import pytest

from autodist.capture.keras import steps
from autodist.capture.keras.steps import timing_the_start


class _Step:
    """Traces in its first call, which takes 100 s by the clock of `keras_progress`; a later one takes 1 s."""

    def __init__(self) -> None:
        self.traces, self.now = 0, 0.0

    def __call__(self, data: Any) -> Any:
        self.now += 1 if self.traces else 100
        self.traces = 1
        return {"loss": data}


def test_the_first_call_does_not_count_and_all_others_do(monkeypatch: pytest.MonkeyPatch) -> None:
    step, model = _Step(), keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    monkeypatch.setattr(steps, "time", SimpleNamespace(time=lambda: step.now))
    timed = timing_the_start(step, model)
    bar = keras.callbacks.ProgbarLogger()
    bar.set_params({"verbose": 1, "epochs": 1, "steps": 3})
    bar.set_model(model)
    bar.on_epoch_begin(0)
    began = bar.progbar._start
    for batch in range(3):
        assert timed(batch) == {"loss": batch}
        bar.on_train_batch_end(batch, {})
    assert bar.progbar._start == began + 100
    bar.on_epoch_begin(1)
    assert bar.progbar._start < began + 100


def test_a_fit_without_a_progress_bar_stays() -> None:
    step, model = _Step(), keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    assert timing_the_start(step, model)(1) == {"loss": 1}
