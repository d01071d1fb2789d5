"""Trains on two workers, of which one kills itself once in the middle; for `bench.recovery`.

    python -m bench.recover MODEL FOLDER AT EVERY IMAGE

Appends a line `{"mark": …, "at": seconds, "step": …, "is_chief": …}` to FOLDER/marks.jsonl for each moment of the run,
by the clock that all processes of the machine share.
"""

# ruff: noqa: E402, I001  # the clock starts before the imports

from __future__ import annotations

import time

BEGAN = time.monotonic()

import json
import logging
import os
import pathlib
import signal
import sys
from typing import Any

from autodist import AutoDist, ResourceSpec  # before TensorFlow, to suppress its startup messages

import keras
import numpy as np

from autodist.checkpoint.checkpoints import Checkpoints

BATCHES = {"digits": 64, "resnet50": 8}
WORKERS = 2
STEPS_AFTER = 3
"""Number of steps after the one that was lost."""


def main() -> None:
    model_name, folder = sys.argv[1], pathlib.Path(sys.argv[2])
    at, every, image = (int(word) for word in sys.argv[3:])
    marks = Marks(folder / "marks.jsonl")
    marks.add("script", BEGAN)
    marks.add("imported")
    keras.utils.set_random_seed(1)
    spec = {
        "nodes": [{"address": "localhost", "cpus": list(range(WORKERS)), "workers": WORKERS}],
        "checkpoint": {"folder": str(folder / "checkpoints"), "every_steps": every},
        "max_restarts": 1,
    }
    ad = AutoDist(resource_spec=ResourceSpec.from_dict(spec))
    marks.is_chief = ad.is_chief
    logging.getLogger("autodist").addHandler(LogMarks(marks))
    _mark_restoring(marks)
    with ad.scope():
        model, x, y = make_model(model_name, at + STEPS_AFTER, image)
        marks.add("fit")
        try:
            model.fit(x, y, batch_size=BATCHES[model_name], verbose=0, callbacks=[Watch(ad, marks, at)])
        except BaseException:
            marks.add("raised")
            raise


def make_model(name: str, steps: int, image: int) -> tuple[keras.Model, np.ndarray, np.ndarray]:
    """Returns a compiled model, and examples and labels for some steps.

    Args:
        name: "digits", the model of `examples/digits_keras.py`, or "resnet50".
        steps: the number of steps.
        image: width and height of an image, for ResNet50.
    """
    if name == "digits":
        shape: tuple[int, int, int] = (8, 8, 1)
        layers = [
            keras.Input(shape),
            keras.layers.Conv2D(16, 3, padding="same", activation="tanh"),
            keras.layers.Conv2D(32, 3, activation="tanh"),
            keras.layers.Conv2D(64, 3, strides=2, activation="tanh"),
            keras.layers.Flatten(),
            keras.layers.Dense(10, "softmax"),
        ]
        model: keras.Model = keras.Sequential(layers)
    else:
        shape = (image, image, 3)
        model = keras.applications.ResNet50(weights=None, input_shape=shape, classes=10)
    optimizer = keras.optimizers.SGD(learning_rate=0.05, momentum=0.9)
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    rng, count = np.random.default_rng(0), BATCHES[name] * steps
    return model, rng.standard_normal((count, *shape), dtype=np.float32), rng.integers(10, size=count)


class Marks:
    """Appends the moments of this process to the file of the run.

    Attributes:
        is_chief: True on the chief; None until it is known.
    """

    def __init__(self, file: pathlib.Path) -> None:
        self.is_chief: bool | None = None
        self._file = file

    def add(self, mark: str, at: float | None = None, step: int = 0) -> None:
        line = {"mark": mark, "at": at or time.monotonic(), "step": step, "is_chief": self.is_chief}
        with self._file.open("a") as file:
            file.write(json.dumps(line) + "\n")


class LogMarks(logging.Handler):
    """Marks the decision to restart, and the phases of a start by the first word after the seconds."""

    def __init__(self, marks: Marks) -> None:
        super().__init__()
        self._marks = marks

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage().startswith("all workers start again"):
            self._marks.add("ended")
        seconds, phase, text = record.getMessage().partition(" s: ")
        if phase and seconds.strip().replace(".", "").isdecimal():
            self._marks.add("joined" if "have joined" in text else text.split()[0])


class Watch(keras.callbacks.Callback):
    """Marks the steps, and kills the second worker before one of them, in the first start."""

    def __init__(self, ad: Any, marks: Marks, at: int) -> None:
        super().__init__()
        self._ad, self._marks, self._at = ad, marks, at
        self._is_first_start = ad.steps_done == 0

    def on_train_batch_begin(self, batch: int, logs: object = None) -> None:
        if self._is_first_start and not self._marks.is_chief and self._ad.steps_done == self._at:
            self._marks.add("killed", step=self._at)
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        self._marks.add("step", step=self._ad.steps_done)


def _mark_restoring(marks: Marks) -> None:
    plain = Checkpoints.restore

    def restore(self: Checkpoints, *arguments: Any, **options: Any) -> Any:
        marks.add("restoring")
        try:
            return plain(self, *arguments, **options)
        finally:
            marks.add("restored")

    Checkpoints.restore = restore  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
